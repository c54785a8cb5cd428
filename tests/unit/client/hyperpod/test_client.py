"""Test the way from one generation into the next, and to the end, against a stand-in for the package."""

import os
import threading
import time

import pytest
from torch.distributed import TCPStore

from checkpointless.launcher.client.agent_client import AgentLostError
from checkpointless.launcher.client.factory import HPAgentK8sAPIFactory, wait_rank
from checkpointless.launcher.client.hyperpod import HyperPodClient
from checkpointless.launcher.client.hyperpod import client as hyperpod_client
from checkpointless.launcher.client.hyperpod.client import _VendorPackage
from checkpointless.launcher.protocol.messages import FaultNotice, Finish
from tests.unit.client.hyperpod.turns import MakeAgent, begin, enter, until

# --- its rank ---------------------------------------------------------------------------------------------------


def test_wait_rank_asks_the_agent_once_and_updates_the_environment(make_agent: MakeAgent) -> None:
    agent = make_agent()
    assert int(os.environ["RANK"]) < 0
    wait_rank()
    assert os.environ["RANK"] == "0"
    assert os.environ["MASTER_PORT"] == str(agent.port)
    assert HPAgentK8sAPIFactory()().rank == 0
    agent.automatic = False  # nobody would answer a second question
    wait_rank()


def test_a_spare_without_a_rank_is_not_refused(make_agent: MakeAgent) -> None:
    make_agent().envs = {"RANK": "-1", "SPARE": "True"}
    wait_rank()
    assert (os.environ["RANK"], os.environ["SPARE"]) == ("-1", "True")


def test_wait_rank_waits_until_it_is_told(make_agent: MakeAgent, caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient(_VendorPackage.load(), start_timeout_s=0.1)
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


# --- a generation, and the next ---------------------------------------------------------------------------------


def test_hello_and_go(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    with pytest.raises(TimeoutError):
        client.wait_go(-1, 0.2)
    agent.start()
    go = client.wait_go(-1, 60)
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
    go = client.wait_go(0, 60)
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
    assert client.wait_go(-1, 60).generation == 0
    assert client.pending_fault(0) is None
    assert agent.count("at_rcb_barrier") == 1


def test_a_fault_before_all_have_met_leads_back_to_the_barrier(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    begin(client, agent)
    agent.wait_for("past_rcb_barrier")
    time.sleep(0.2)
    agent.envs = {}
    agent.fault()
    agent.wait_for("at_rcb_barrier", 2)
    time.sleep(0.05)
    agent.start()
    assert client.wait_go(-1, 60).generation == 1
    assert client.pending_fault(1) is None


@pytest.mark.slow
def test_a_rank_0_that_died_before_all_have_met_leads_back_to_the_barrier(make_agent: MakeAgent) -> None:
    """The other rank is back well before it would give up the store of rank 0."""
    agent = make_agent(automatic=False)
    agent.envs = {"RANK": "1"}
    client = HyperPodClient.from_environment()
    begin(client, agent)
    agent.wait_for("past_rcb_barrier")
    agent.fault()
    agent.wait_for("at_rcb_barrier", 2)
    agent.envs = {}
    time.sleep(0.05)
    agent.start()
    assert client.wait_go(-1, 60).generation == 1


def test_a_rank_that_does_not_come_has_a_limit(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient(_VendorPackage.load(), meeting_timeout_s=0.3)
    begin(client, agent)
    with pytest.raises(AgentLostError, match="1 of 2 ranks reached the start of generation 0"):
        client.wait_go(-1, 60)


def test_a_start_that_does_not_come_has_a_limit_except_for_a_spare(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient(_VendorPackage.load(), start_timeout_s=0.2)
    os.environ["SPARE"] = "True"
    client.hello(0)
    agent.wait_for("at_rcb_barrier", 3)
    os.environ["SPARE"] = "False"
    with pytest.raises(AgentLostError, match=r"no start message arrived .* --inprocess-restart"):
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
        client.wait_go(0, 60)


def test_the_same_bug_for_ever_asks_for_new_processes(make_agent: MakeAgent) -> None:
    agent = make_agent()
    client = HyperPodClient.from_environment()
    client.hello(0)
    for generation in range(3):
        assert client.wait_go(generation - 1, 60).generation == generation
        client.report_fault(generation, error="ValueError", message="no", traceback="T", step=4, victim=False)
        client.barrier(generation)
    with pytest.raises(AgentLostError, match="3 times in a row"):
        client.wait_go(2, 60)
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
    assert len(give_up["message"]) == hyperpod_client.MAX_MESSAGE_CHARS


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


# --- the end ----------------------------------------------------------------------------------------------------


def test_done_waits_for_the_others(make_agent: MakeAgent) -> None:
    """The other rank is played by this test, in the store that the two meet in."""
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    begin(client, agent)
    agent.wait_for("past_rcb_barrier")
    other = TCPStore("127.0.0.1", agent.port, is_master=False)
    other.add("checkpointless/0/arrived", 1)
    assert client.wait_go(-1, 60).generation == 0
    client.done(0)
    with pytest.raises(TimeoutError):
        client.wait_finish_or_fault(0, 0.3)
    other.add("checkpointless/0/done", 1)
    other.add("checkpointless/0/left", 1)
    assert client.wait_finish_or_fault(0, 60) == Finish()


def test_a_fault_while_done_is_heard_instead_of_the_finish(make_agent: MakeAgent) -> None:
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    begin(client, agent)
    agent.wait_for("past_rcb_barrier")
    TCPStore("127.0.0.1", agent.port, is_master=False).add("checkpointless/0/arrived", 1)
    client.wait_go(-1, 60)
    client.done(0)
    agent.fault()
    assert isinstance(client.wait_finish_or_fault(0, 60), FaultNotice)
    until(lambda: not [each for each in threading.enumerate() if each.name == "checkpointless-hyperpod-finish"])


def test_done_has_a_limit(make_agent: MakeAgent, environment: pytest.MonkeyPatch) -> None:
    environment.setattr(hyperpod_client, "FINISH_TIMEOUT_S", 0.2)
    environment.setattr(hyperpod_client, "LEAVE_TIMEOUT_S", 0.1)
    agent = make_agent(automatic=False)
    client = HyperPodClient.from_environment()
    begin(client, agent)
    agent.wait_for("past_rcb_barrier")
    TCPStore("127.0.0.1", agent.port, is_master=False).add("checkpointless/0/arrived", 1)
    client.wait_go(-1, 60)
    client.done(0)
    assert client.wait_finish_or_fault(0, 60) == Finish()
