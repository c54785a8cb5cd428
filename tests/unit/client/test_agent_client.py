"""Test the rank's client against an agent that the test plays."""

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpointless.launcher.client import wait_rank
from checkpointless.launcher.client.agent_client import AgentClient, AgentLostError, StandaloneClient
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import exception_cause
from checkpointless.launcher.protocol.messages import Answer, Barrier, Done, FaultNotice, Go, Inquire, Message


class Agent:
    """Plays the other end of a client's connection."""

    def __init__(self, connection: socket.socket, client: AgentClient) -> None:
        self.connection, self.client = connection, client
        connection.settimeout(60)
        self._lines = messages.LineBuffer()
        self._heard: list[Message] = []

    def say(self, *said: Any) -> None:
        self.connection.sendall(b"".join(messages.encode(message) for message in said))

    def hear(self) -> Message:
        while not self._heard:
            lines = self._lines.feed(self.connection.recv(65536))
            self._heard += [messages.FROM_RANK.decode(line) for line in lines]
        return self._heard.pop(0)

    def wait_until_read(self) -> None:
        """Wait until the client has read all that was said."""
        self.say(Inquire(99))
        while not isinstance(self.hear(), Answer):
            continue


@pytest.fixture
def agent() -> Iterator[Agent]:
    ours, theirs = socket.socketpair()
    made = Agent(ours, AgentClient(theirs, rank=3))
    yield made
    made.client.close()
    ours.close()


@pytest.fixture
def client(agent: Agent) -> AgentClient:
    return agent.client


def go(generation: int) -> Go:
    return Go(generation, None, {"MASTER_PORT": "1"}, 4)


def notice(generation: int) -> FaultNotice:
    return FaultNotice(generation, "1", "rank 1 killed by SIGKILL", 1)


def test_a_notice_of_an_older_generation_is_ignored(client: AgentClient, agent: Agent) -> None:
    agent.say(notice(0))
    agent.wait_until_read()
    assert client.pending_fault(0) == notice(0)
    called: list[FaultNotice] = []
    client.on_fault = called.append
    agent.say(go(2), notice(1), notice(0))
    agent.wait_until_read()
    assert (called, [client.pending_fault(of) for of in range(3)]) == ([], [None] * 3)


def test_a_notice_that_comes_before_the_rank_left_the_barrier_is_kept(client: AgentClient, agent: Agent) -> None:
    client.send(Barrier(1))
    assert agent.hear() == Barrier(1)
    agent.say(go(2), notice(2))
    agent.wait_until_read()
    assert client.wait_go(1, 5).generation == 2
    assert client.pending_fault(2) == notice(2)
    assert client.wait_finish_or_fault(2, 5) == notice(2)


def test_an_inquiry_is_answered_from_another_thread(client: AgentClient, agent: Agent) -> None:
    asked_on: list[threading.Thread] = []

    def answer(inquiry: int) -> Answer:
        asked_on.append(threading.current_thread())
        return Answer(inquiry, True, "in all_reduce", True, {"0/cuda": 17})

    client.on_inquire = answer
    agent.say(Inquire(5))
    assert agent.hear() == Answer(5, True, "in all_reduce", True, {"0/cuda": 17})
    assert asked_on[0] is not threading.main_thread()


def test_the_end_of_the_agent_wakes_who_waits(client: AgentClient, agent: Agent) -> None:
    threading.Timer(0.05, agent.connection.close).start()
    with pytest.raises(AgentLostError):
        client.wait_go(0, 5)
    with pytest.raises(AgentLostError):
        client.send(Done(0))


@pytest.mark.parametrize("said", [b"nonsense\n", b'{"type":"hello"}\n'])
def test_an_agent_that_breaks_the_protocol_is_left(client: AgentClient, agent: Agent, said: bytes) -> None:
    agent.connection.sendall(said)
    with pytest.raises(AgentLostError):
        client.wait_go(0, 5)
    assert agent.connection.recv(1) == b""


def test_a_standalone_rank_regroups_with_itself_but_does_not_repeat_a_bug_for_ever() -> None:
    client = StandaloneClient()
    called: list[FaultNotice] = []
    client.on_fault = called.append
    client.send(messages.Hello(0))
    cause = exception_cause(client.rank, "ValueError", "no\nmore", "T", 4, victim=False)
    for generation in range(3):
        go = client.wait_go(generation - 1, 1)
        assert isinstance(go, Go)
        assert (go.generation, go.env.get("JOB_RESTART_COUNT", "0")) == (generation, str(generation))
        assert client.pending_fault(generation) is None
        client.send(messages.FaultReport(generation, cause))
        assert called[generation].cause == "rank 0 raised ValueError at step 4: no"
        assert client.pending_fault(generation) == called[generation]
        client.send(Barrier(generation))
    with pytest.raises(AgentLostError, match="3 times in a row"):
        client.wait_go(2, 1)
    again = StandaloneClient()
    again.send(Done(0))
    assert again.wait_finish_or_fault(0, 1) == messages.Finish()


RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"RANK": ""}, "RANK not set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not set"),
        ({"MASTER_PORT": ""}, None),
        ({"RANK": "one"}, "whole numbers"),
        ({"RANK": "2"}, "not below"),
    ],
)
def test_wait_rank(monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str | None) -> None:
    for name, value in (RANK | change).items():
        monkeypatch.setenv(name, value)
    if said is None:
        wait_rank()
        return
    with pytest.raises(AssertionError, match=said):
        wait_rank()
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    wait_rank()
