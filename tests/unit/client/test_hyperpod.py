"""The adapter to SageMaker HyperPod's client package, against a stand-in for that package and its agent."""

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from checkpointless.client import factory, hyperpod
from checkpointless.client.agent_client import AgentLostError
from checkpointless.client.factory import HPAgentK8sAPIFactory, wait_rank
from checkpointless.client.hyperpod import HyperPodClient, VendorPackage, worker_envs
from checkpointless.client.standalone import StandaloneClient
from checkpointless.environment import HYPERPOD_SOCKET_ENV
from checkpointless.wire.messages import FaultNotice, Finish
from tests import hyperpod_stand_in as stand_in

MakeAgent = Callable[..., stand_in.Agent]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The stand-in is installed; the environment, the factory's client and all clients end with the test."""
    made: list[HyperPodClient] = []
    original = HyperPodClient.__init__

    def remember(client: HyperPodClient, *args: Any, **settings: Any) -> None:
        original(client, *args, **settings)
        made.append(client)

    before = dict(os.environ)
    with monkeypatch.context() as patch:
        patch.setattr(HyperPodClient, "__init__", remember)
        patch.setattr(factory, "_of_other_launcher", None)
        patch.setattr(hyperpod, "LISTEN_S", 1.0)
        for name, module in stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        yield patch
        for client in made:
            client.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make_agent(environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeAgent]:
    agents: list[stand_in.Agent] = []

    def make(**settings: Any) -> stand_in.Agent:
        agent = stand_in.Agent(tmp_path / f"agent{len(agents)}", 1, **settings)
        agents.append(agent)
        os.environ.update(agent.environment(0))
        return agent

    yield make
    for agent in agents:
        agent.close()


def enter(client: HyperPodClient, agent: stand_in.Agent) -> None:
    """Be in the generation that ``agent`` starts next."""
    client.hello(int(os.environ["JOB_RESTART_COUNT"]))
    agent.wait_for("at_rcb_barrier", 1)
    time.sleep(0.05)
    agent.start()
    assert client.wait_go(agent.restart_count - 1, 10).generation == agent.restart_count


def until(condition: Callable[[], object], timeout_s: float = 5) -> None:
    by_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < by_s
        time.sleep(0.01)


# --- which client a process gets ----------------------------------------------------------------------------------


def test_the_factory_takes_the_adapter_under_the_vendors_agent(make_agent: MakeAgent) -> None:
    make_agent()
    client = HPAgentK8sAPIFactory()()
    assert isinstance(client, HyperPodClient)
    assert HPAgentK8sAPIFactory()() is client


def test_elsewhere_the_installed_package_changes_nothing(environment: pytest.MonkeyPatch) -> None:
    environment.delenv(stand_in.SOCKET_ENV, raising=False)
    environment.setenv("WORLD_SIZE", "1")
    assert isinstance(HPAgentK8sAPIFactory()(), StandaloneClient)


def test_under_our_own_agent_the_vendors_is_not_asked(
    make_agent: MakeAgent, environment: pytest.MonkeyPatch
) -> None:
    agent = make_agent()
    ours = StandaloneClient()
    environment.setattr(factory.AgentClient, "from_environment", lambda: ours)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    wait_rank()
    assert HPAgentK8sAPIFactory()() is ours
    assert agent.heard == []


def test_the_variable_is_the_one_that_the_package_reads() -> None:
    assert HYPERPOD_SOCKET_ENV == stand_in.SOCKET_ENV


def test_nothing_is_said_about_a_launcher_that_does_not_respawn(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    make_agent()
    os.environ["RANK"] = "0"
    with caplog.at_level(logging.WARNING):
        HPAgentK8sAPIFactory()()
    assert "does not respawn" not in caplog.text


# --- a package that is missing, broken or too old -----------------------------------------------------------------


def test_a_missing_package_is_one_line_that_says_what_to_do(environment: pytest.MonkeyPatch) -> None:
    for name in stand_in.modules():
        environment.setitem(sys.modules, name, None)
    environment.setenv(stand_in.SOCKET_ENV, "/nowhere")
    with pytest.raises(RuntimeError, match=r"not installed.*pip install 'checkpointless\[hyperpod\]'") as raised:
        HPAgentK8sAPIFactory()()
    assert "\n" not in str(raised.value)


def test_a_package_that_misses_one_of_its_own_is_told_apart(environment: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'fastapi'", name="fastapi")

    environment.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=r"cannot be imported \(No module named 'fastapi'\)"):
        VendorPackage.load()


class OldClient:
    """What an older package might have."""

    hyperpod_barrier = hyperpod_wait_fault = hyperpod_send_fault = hyperpod_wait_rank_info = print


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "InProcessRestartSocketClient",
            OldClient,
            "has no InProcessRestartSocketClient.hyperpod_past_rcb_barrier:",
        ),
        ("InProcessRestartSocketClient", None, "InProcessRestartSocketClient.hyperpod_wait_rank_info, "),
        ("HyperPodIPCException", None, "has no HyperPodIPCException: install a version"),
        ("RestartMode", None, "RestartMode.IN_PROCESS_RESTART"),
    ],
)
def test_a_package_without_a_name_that_is_used(
    environment: pytest.MonkeyPatch, name: str, value: object, said: str
) -> None:
    for module in stand_in.modules(**{name: value}).items():
        environment.setitem(sys.modules, *module)
    with pytest.raises(RuntimeError) as raised:
        VendorPackage.load()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_agent_that_is_not_there(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv(stand_in.SOCKET_ENV, str(tmp_path / "nobody"))
    with pytest.raises(RuntimeError, match=r"cannot be reached .* --inprocess-restart"):
        HPAgentK8sAPIFactory()()


# --- wait_rank ----------------------------------------------------------------------------------------------------


def test_wait_rank_asks_the_agent_once_and_updates_the_environment(make_agent: MakeAgent) -> None:
    agent = make_agent()
    assert int(os.environ["RANK"]) < 0
    wait_rank()
    assert os.environ["RANK"] == "0"
    assert os.environ["MASTER_PORT"] == str(agent.port)
    assert HPAgentK8sAPIFactory()().rank == 0
    began_s = time.monotonic()
    wait_rank()
    assert time.monotonic() - began_s < 1


def test_a_spare_without_a_rank_is_not_refused(make_agent: MakeAgent) -> None:
    make_agent().envs = {"RANK": "-1", "SPARE": "True"}
    wait_rank()
    assert (os.environ["RANK"], os.environ["SPARE"]) == ("-1", "True")


def test_wait_rank_waits_until_it_is_told(make_agent: MakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient(VendorPackage.load(), start_timeout_s=0.1)
    threading.Timer(0.5, agent.tell_ranks).start()
    client.wait_rank()
    assert os.environ["RANK"] == "0"
    assert "still waiting to be told which rank this is" in caplog.text


def test_wait_rank_says_what_it_was_told_instead(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    agent.envs = {"WORLD_SIZE": ""}
    client = HyperPodClient.from_environment()
    threading.Timer(0.1, agent.tell_ranks).start()
    with pytest.raises(AssertionError, match=r"did not say which rank this is .*WORLD_SIZE.* --inprocess-restart"):
        client.wait_rank()


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
    assert worker_envs(("job_start", {"worker_envs": ENV}), "job_start") == ENV
    with pytest.raises(ValueError):
        worker_envs(reply, "job_start")


# --- a generation, its end, and the next --------------------------------------------------------------------------


def test_hello_and_go(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    with pytest.raises(TimeoutError):
        client.wait_go(-1, 0.2)
    agent.start()
    go = client.wait_go(-1, 10)
    assert (go.generation, go.incident, go.high_water) == (0, None, -1)
    assert go.env["RANK"] == "0"
    assert go.env["JOB_RESTART_COUNT"] == "0"
    assert go.env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert int(go.env["MASTER_PORT"]) != agent.port
    TCPStore(go.env["MASTER_ADDR"], int(go.env["MASTER_PORT"]), is_master=False).set("there", "1")
    assert agent.count("past_rcb_barrier") == 1
    assert client.rank == 0


def test_a_fault_is_reported_with_its_cause_and_heard_at_once(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    enter(client, agent)
    called: list[FaultNotice] = []
    client.on_fault = called.append
    client.report_fault(0, error="ValueError", message="no\n" + "x" * 9999, traceback="", step=3, victim=False)
    notice = FaultNotice(0, "1", "rank 0 raised ValueError at step 3: no", 0)
    assert called == [notice]
    (said,) = agent.wait_for("job_fault")
    assert (said["rank"], said["restart_mode"], said["reason"]) == (0, "in_process_restart", "ValueError")
    assert said["message"] == notice.cause
    agent.fault()
    client.barrier(0)
    agent.wait_for("at_rcb_barrier", 2)
    time.sleep(0.05)
    agent.start()
    go = client.wait_go(0, 10)
    assert (go.generation, go.incident, go.high_water) == (1, "1", 2)
    assert called == [notice]


def test_a_notice_ends_the_generation_once(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    called: list[FaultNotice] = []
    client.on_fault = called.append
    enter(client, agent)
    agent.fault()
    until(lambda: called)
    agent.say(0, "job_fault", restart_count=0)
    agent.say(0, "job_fault")
    time.sleep(0.2)
    assert called == [FaultNotice(0, "1", "SageMaker HyperPod reported a fault", None)]
    assert client.pending_fault(0) == called[0]


def test_a_notice_of_an_older_generation_is_ignored(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    agent.restart_count = 3
    os.environ.update(agent.environment(0))
    client = HyperPodClient.from_environment()
    enter(client, agent)
    agent.say(0, "job_fault", restart_count=2)
    time.sleep(0.2)
    assert client.pending_fault(3) is None
    agent.say(0, "job_fault", restart_count=3)
    until(lambda: client.pending_fault(3))


def test_a_notice_at_the_barrier_is_no_fault_of_the_generation_to_come(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    agent.say(0, "job_fault", restart_count=0)
    time.sleep(0.2)
    agent.start()
    assert client.wait_go(-1, 10).generation == 0
    assert client.pending_fault(0) is None
    assert agent.count("at_rcb_barrier") == 1


def test_a_fault_before_all_have_met_leads_back_to_the_barrier(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    agent.envs = {"WORLD_SIZE": "2"}
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()
    agent.wait_for("past_rcb_barrier")
    time.sleep(0.2)
    agent.envs = {}
    agent.fault()
    agent.wait_for("at_rcb_barrier", 2)
    time.sleep(0.05)
    agent.start()
    assert client.wait_go(-1, 10).generation == 1
    assert client.pending_fault(1) is None


def test_a_rank_0_that_died_before_all_have_met_leads_back_to_the_barrier(make_agent: MakeAgent) -> None:
    """Well before its store is given up."""
    agent = make_agent(automatic=False)
    agent.envs = {"RANK": "1", "WORLD_SIZE": "2"}
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()
    agent.wait_for("past_rcb_barrier")
    agent.fault()
    agent.wait_for("at_rcb_barrier", 2)
    agent.envs = {}
    time.sleep(0.05)
    agent.start()
    assert client.wait_go(-1, 10).generation == 1


def test_a_rank_that_does_not_come_has_a_limit(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    agent.envs = {"WORLD_SIZE": "2"}
    client = HyperPodClient(VendorPackage.load(), meeting_timeout_s=0.3)
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()
    with pytest.raises(AgentLostError, match="1 of 2 ranks came to the start of generation 0"):
        client.wait_go(-1, 10)


def test_a_start_that_does_not_come_has_a_limit_except_for_a_spare(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient(VendorPackage.load(), start_timeout_s=0.2)
    os.environ["SPARE"] = "True"
    client.hello(0)
    agent.wait_for("at_rcb_barrier", 3)
    os.environ["SPARE"] = "False"
    with pytest.raises(AgentLostError, match=r"no start came .* --inprocess-restart"):
        client.wait_go(-1, 10)


@pytest.mark.parametrize(
    ("envs", "said"),
    [
        ({"JOB_RESTART_COUNT": "0"}, "JOB_RESTART_COUNT=0 came after generation 0"),
        ({"WORLD_SIZE": "2"}, "rank 0 of 1 would become rank 0 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 0 of 1 would become rank 1 of 2"),
        ({"RANK": "1"}, "not below WORLD_SIZE"),
    ],
)
def test_a_start_that_would_mix_states_ends_the_process(
    make_agent: MakeAgent, envs: dict[str, str], said: str
) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    enter(client, agent)
    agent.fault()
    until(lambda: client.pending_fault(0))
    client.barrier(0)
    agent.wait_for("at_rcb_barrier", 2)
    time.sleep(0.05)
    agent.envs = envs
    agent.start()
    with pytest.raises(AgentLostError, match=said):
        client.wait_go(0, 10)


def test_the_same_bug_for_ever_asks_for_new_processes(make_agent: MakeAgent) -> None:
    agent = make_agent()
    client = HyperPodClient.from_environment()
    client.hello(0)
    for generation in range(3):
        assert client.wait_go(generation - 1, 10).generation == generation
        client.report_fault(generation, error="ValueError", message="no", traceback="T", step=4, victim=False)
        client.barrier(generation)
    with pytest.raises(AgentLostError, match="3 times in a row"):
        client.wait_go(2, 10)
    modes = [message["restart_mode"] for message in agent.wait_for("job_fault", 3)]
    assert modes == ["in_process_restart", "in_process_restart", "process_level_restart"]


def test_what_a_rank_cannot_do_alone(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    enter(client, agent)
    client.request_replacement(0, "the CUDA context is broken")
    client.give_up(0, "y" * 5000)
    replace, give_up = agent.wait_for("job_fault", 2)
    assert (replace["restart_mode"], replace["message"]) == ("in_process_restart", "the CUDA context is broken")
    assert give_up["restart_mode"] == "process_level_restart"
    assert len(give_up["message"]) == hyperpod.MAX_MESSAGE_CHARS


def test_an_agent_that_is_gone_is_told(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    enter(client, agent)
    agent.close()
    with pytest.raises(AgentLostError, match="could not report a fault"):
        client.give_up(0, "over")
    with pytest.raises(AgentLostError):
        client.wait_go(0, 5)


def test_a_second_block_is_refused(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    enter(client, agent)
    with pytest.raises(AgentLostError, match="one block per process"):
        client.hello(0)


# --- the end ------------------------------------------------------------------------------------------------------


def test_done_waits_for_the_others(make_agent: MakeAgent) -> None:
    """The other rank is played by this test, in the store that the two meet in."""
    agent = make_agent(automatic=False)
    agent.envs = {"WORLD_SIZE": "2"}
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()
    agent.wait_for("past_rcb_barrier")
    other = TCPStore("127.0.0.1", agent.port, is_master=False)
    other.add("checkpointless/0/arrived", 1)
    assert client.wait_go(-1, 10).generation == 0
    client.done(0)
    with pytest.raises(TimeoutError):
        client.wait_finish_or_fault(0, 0.3)
    other.add("checkpointless/0/done", 1)
    other.add("checkpointless/0/left", 1)
    assert client.wait_finish_or_fault(0, 10) == Finish()


def test_a_fault_while_done_is_heard_instead_of_the_finish(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    agent.envs = {"WORLD_SIZE": "2"}
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()
    agent.wait_for("past_rcb_barrier")
    TCPStore("127.0.0.1", agent.port, is_master=False).add("checkpointless/0/arrived", 1)
    client.wait_go(-1, 10)
    client.done(0)
    agent.fault()
    assert isinstance(client.wait_finish_or_fault(0, 10), FaultNotice)
    until(lambda: not [each for each in threading.enumerate() if each.name == "checkpointless-hyperpod-finish"])


def test_done_has_a_limit(make_agent: MakeAgent, environment: pytest.MonkeyPatch) -> None:
    environment.setattr(hyperpod, "FINISH_TIMEOUT_S", 0.2)
    environment.setattr(hyperpod, "LEAVE_TIMEOUT_S", 0.1)
    agent = make_agent(automatic=False)
    agent.envs = {"WORLD_SIZE": "2"}
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()
    agent.wait_for("past_rcb_barrier")
    TCPStore("127.0.0.1", agent.port, is_master=False).add("checkpointless/0/arrived", 1)
    client.wait_go(-1, 10)
    client.done(0)
    assert client.wait_finish_or_fault(0, 10) == Finish()
