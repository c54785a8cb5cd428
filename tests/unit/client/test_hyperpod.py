"""Test the client under SageMaker HyperPod's agent, against a stand-in for its package and its agent."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from checkpointless.launcher import client as clients
from checkpointless.launcher.client import HPAgentK8sAPIFactory, hyperpod, wait_rank
from checkpointless.launcher.client.agent_client import AgentLostError, StandaloneClient
from checkpointless.launcher.client.hyperpod import HyperPodClient, _worker_envs
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import exception_cause
from checkpointless.launcher.protocol.messages import Barrier, Done, FaultNotice, Finish, GiveUp, Go, Hello, Replace
from checkpointless.system.environment import HYPERPOD_SOCKET_ENV
from tests import hyperpod_stand_in as stand_in
from tests.waiting import wait_until


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Install the stand-in; the environment, the factory's client and all clients end with the test."""
    made: list[HyperPodClient] = []
    original = HyperPodClient.__init__

    def remember(client: HyperPodClient, *args: Any, **settings: Any) -> None:
        original(client, *args, **settings)
        made.append(client)

    before = dict(os.environ)
    with monkeypatch.context() as patch:
        patch.setattr(HyperPodClient, "__init__", remember)
        patch.setattr(clients, "_of_other_launcher", None)
        patch.setattr(hyperpod, "_LISTEN_S", 1.0)
        patch.setitem(sys.modules, stand_in.MODULE, stand_in.module())
        yield patch
        for client in made:
            client.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def agent(environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[stand_in.Agent]:
    agent = stand_in.Agent(tmp_path / "agent", 1, automatic=False)
    os.environ.update(agent.environment(0))
    yield agent
    agent.close()


def start(agent: stand_in.Agent, count: int = 1) -> None:
    """Start the ranks, once they have been at the barrier so often."""
    agent.wait_for("at_rcb_barrier", count)
    agent.start()


def in_block(agent: stand_in.Agent, others: int = 0) -> tuple[HyperPodClient, TCPStore | None]:
    """Bring a client into the generation that ``agent`` starts next; return the store, too, if there are others."""
    client, generation, store = HyperPodClient(), agent.restart_count, None
    if others:
        agent.envs = {"WORLD_SIZE": str(1 + others)}
    client.send(Hello(generation))
    start(agent)
    if others:
        agent.wait_for("past_rcb_barrier")
        store = TCPStore("127.0.0.1", agent.port, is_master=False)
        store.append(f"checkpointless/{generation}/committed/{generation}", "7 ")  # type: ignore[attr-defined]
        store.add(f"checkpointless/{generation}/arrived/{generation}", others)
    assert client.wait_go(generation - 1, 60).generation == generation
    return client, store


# --- the package, and who uses it -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "InProcessRestartSocketClient", "HyperPodIPCException", "RestartMode"])
def test_a_package_that_is_missing_or_lacks_a_name_is_one_line(environment: pytest.MonkeyPatch, name: str) -> None:
    environment.setenv(stand_in.SOCKET_ENV, "/nowhere")
    environment.setitem(sys.modules, stand_in.MODULE, stand_in.module(name) if name else None)
    with pytest.raises(RuntimeError, match=rf"{name}.*pip install -e '\.\[hyperpod\]' in a clone") as raised:
        HPAgentK8sAPIFactory()()
    assert "\n" not in str(raised.value)


def test_the_factory_takes_hyperpods_client_under_its_agent_only(
    agent: stand_in.Agent, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert HYPERPOD_SOCKET_ENV == stand_in.SOCKET_ENV
    os.environ["RANK"] = "0"
    with caplog.at_level(logging.WARNING):
        client = HPAgentK8sAPIFactory()()
    assert isinstance(client, HyperPodClient)
    assert HPAgentK8sAPIFactory()() is client
    assert "does not respawn" not in caplog.text
    heard = len(agent.wait_for("init"))
    ours = StandaloneClient()
    with environment.context() as patch:
        patch.setattr(clients.AgentClient, "from_environment", lambda: ours)
        wait_rank()
        assert HPAgentK8sAPIFactory()() is ours
    assert len(agent.heard) == heard
    environment.setattr(clients, "_of_other_launcher", None)
    environment.delenv(stand_in.SOCKET_ENV)
    environment.setenv("WORLD_SIZE", "1")
    assert isinstance(HPAgentK8sAPIFactory()(), StandaloneClient)


ENV = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "JOB_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    "reply",
    [
        None,
        ("job_fault", {"worker_envs": ENV}),
        ("job_start", None),
        ("job_start", {}),
        ("job_start", {"worker_envs": ENV | {"RANK": 0}}),
        ("job_start", {"worker_envs": ENV | {"RANK": "1"}}),
        ("job_start", {"worker_envs": ENV | {"RANK": "-1"}}),
        ("job_start", {"worker_envs": ENV | {"MASTER_PORT": "__import__('os')"}}),
        ("job_start", {"worker_envs": {name: value for name, value in ENV.items() if name != "JOB_RESTART_COUNT"}}),
    ],
)
def test_a_start_that_makes_no_sense_is_refused(reply: object) -> None:
    assert _worker_envs(("job_start", {"worker_envs": ENV}), "job_start") == ENV
    with pytest.raises(ValueError):
        _worker_envs(reply, "job_start")


# --- its rank ---------------------------------------------------------------------------------------------------


def test_wait_rank_asks_the_agent_once_and_updates_the_environment(agent: stand_in.Agent) -> None:
    agent.automatic = True
    assert int(os.environ["RANK"]) < 0
    wait_rank()
    assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("0", str(agent.port))
    assert HPAgentK8sAPIFactory()().rank == 0
    agent.automatic = False  # nobody would answer a second question
    wait_rank()


def test_a_spare_waits_for_its_rank(agent: stand_in.Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.envs = {"RANK": "-1", "SPARE": "True"}
    client = HyperPodClient(start_timeout_s=0.1)
    threading.Timer(0.5, agent.tell).start()
    client.wait_rank()
    assert (os.environ["RANK"], os.environ["SPARE"]) == ("-1", "True")
    assert "still waiting to be told which rank this is" in caplog.text


# --- a generation, and the next ---------------------------------------------------------------------------------


def test_a_rank_waits_for_a_go_with_a_store(agent: stand_in.Agent, caplog: pytest.LogCaptureFixture) -> None:
    client = HyperPodClient()
    client.send(Hello(0))
    agent.wait_for("at_rcb_barrier")
    with pytest.raises(TimeoutError):
        client.wait_go(-1, 0.2)
    with caplog.at_level(logging.INFO):
        agent.say(0, "job_fault", restart_count=0)  # there is nothing to leave
        wait_until(lambda: "ignores the fault notice 0" in caplog.text)
    agent.start()
    go = client.wait_go(-1, 60)
    assert isinstance(go, Go)
    assert (go.incident, go.high_water, go.env["RANK"], go.env["JOB_RESTART_COUNT"]) == (None, -1, "0", "0")
    assert int(go.env["MASTER_PORT"]) != agent.port
    TCPStore(go.env["MASTER_ADDR"], int(go.env["MASTER_PORT"]), is_master=False).set("there", "1")
    assert (agent.count("at_rcb_barrier"), agent.count("past_rcb_barrier")) == (1, 1)
    assert (client.rank, client.pending_fault(0)) == (0, None)


def test_a_notice_ends_its_generation_once_and_no_later_one(agent: stand_in.Agent) -> None:
    agent.restart_count = 3
    client, _ = in_block(agent)
    called: list[FaultNotice] = []
    client.on_fault = called.append
    agent.say(0, "job_fault", restart_count=2)
    time.sleep(0.2)
    assert client.pending_fault(3) is None
    agent.fault()
    wait_until(lambda: called)
    agent.say(0, "job_fault", restart_count=3)
    agent.say(0, "job_fault")
    time.sleep(0.2)
    assert called == [FaultNotice(3, "4", "SageMaker HyperPod reported a fault", None)]
    assert client.pending_fault(3) == called[0]


@pytest.mark.parametrize("rank", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_fault_before_all_have_met_leads_back_to_the_barrier(agent: stand_in.Agent, rank: str) -> None:
    """Rank 1 is back well before it would give up the store of rank 0, which died."""
    agent.envs = {"RANK": rank, "WORLD_SIZE": "2"}
    client = HyperPodClient()
    client.send(Hello(0))
    start(agent)
    agent.wait_for("past_rcb_barrier")
    agent.fault()
    agent.envs = {}
    start(agent, 2)
    assert client.wait_go(-1, 60).generation == 1
    assert client.pending_fault(1) is None


def test_a_rank_that_does_not_come_has_a_limit(agent: stand_in.Agent) -> None:
    agent.envs = {"WORLD_SIZE": "2"}
    client = HyperPodClient(meeting_timeout_s=0.3)
    client.send(Hello(0))
    start(agent)
    with pytest.raises(AgentLostError, match="1 of 2 ranks came to the barrier of generation 0"):
        client.wait_go(-1, 60)


@pytest.mark.parametrize(
    ("envs", "said"),
    [
        ({"JOB_RESTART_COUNT": "0"}, "JOB_RESTART_COUNT=0 came after generation 0"),
        ({"WORLD_SIZE": "2"}, "rank 0 of 1 would become rank 0 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 0 of 1 would become rank 1 of 2"),
        ({"RANK": "1"}, "not below WORLD_SIZE"),
    ],
)
def test_a_start_that_mixes_states_ends_the_process(agent: stand_in.Agent, envs: dict[str, str], said: str) -> None:
    client, _ = in_block(agent)
    agent.fault()
    wait_until(lambda: client.pending_fault(0))
    client.send(Barrier(0))
    agent.envs = envs
    start(agent, 2)
    with pytest.raises(AgentLostError, match=said):
        client.wait_go(0, 60)


def test_faults_are_heard_at_once_and_the_same_bug_for_ever_asks_for_new_processes(agent: stand_in.Agent) -> None:
    client = HyperPodClient()
    called: list[FaultNotice] = []
    client.on_fault = called.append
    client.send(Hello(0))
    cause = exception_cause(0, "ValueError", "no\n" + "x" * 9999, "T", 4, victim=False)
    for generation in range(3):
        start(agent, generation + 1)
        go = client.wait_go(generation - 1, 60)
        assert isinstance(go, Go)
        incident = str(generation) if generation else None
        assert (go.generation, go.incident, go.high_water) == (generation, incident, 3 if generation else -1)
        client.send(messages.FaultReport(generation, cause))
        what = "rank 0 raised ValueError at step 4: no"
        assert called[generation:] == [FaultNotice(generation, str(generation + 1), what, 0)]
        agent.fault()
        client.send(Barrier(generation))
    with pytest.raises(AgentLostError, match="3 times in a row"):
        client.wait_go(2, 60)
    reports = agent.wait_for("job_fault", 3)
    assert {(said["rank"], said["reason"], said["message"]) for said in reports} == {(0, "ValueError", what)}
    modes = ["in_process_restart"] * 2 + ["process_level_restart"]
    assert [said["restart_mode"] for said in reports] == modes


def test_what_a_rank_cannot_do_alone(agent: stand_in.Agent) -> None:
    client, _ = in_block(agent)
    client.send(Replace(0, "the CUDA context is broken"))
    client.send(GiveUp(0, "y" * 5000))
    found = [(said["restart_mode"], said["message"]) for said in agent.wait_for("job_fault", 2)]
    assert found == [("in_process_restart", "the CUDA context is broken"), ("process_level_restart", "y" * 1000)]
    with pytest.raises(AgentLostError, match="a process has one block"):
        client.send(Hello(0))


# --- the end ----------------------------------------------------------------------------------------------------


def test_done_waits_for_the_others(agent: stand_in.Agent) -> None:
    """The other rank is played by this test, in the store that the two meet in; it knows of a later step."""
    client, other = in_block(agent, others=1)
    assert other is not None
    assert client._go is not None
    assert client._go.high_water == 7
    client.send(Done(0))
    with pytest.raises(TimeoutError):
        client.wait_finish_or_fault(0, 0.3)
    other.add("checkpointless/0/done/0", 1)
    other.add("checkpointless/0/left/0", 1)
    assert client.wait_finish_or_fault(0, 60) == Finish()


def test_a_fault_while_done_is_heard_instead_of_the_finish(agent: stand_in.Agent) -> None:
    client, _ = in_block(agent, others=1)
    client.send(Done(0))
    agent.fault()
    assert isinstance(client.wait_finish_or_fault(0, 60), FaultNotice)
