"""A node's agent by commands alone: what it does when they cross with what happens to its processes."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.agent.board import Board
from checkpointless.agent.hangs import Heartbeat
from checkpointless.agent.node import TERM_GRACE_S, NodeAgent
from checkpointless.agent.node_protocol import AllDone, Begin, End, Joined, Kill, NodeMessage, RankEnded, Spawn
from checkpointless.agent.rendezvous import LOOPBACK
from checkpointless.agent.workers import Descriptors, Exited, Order, Ready, Started, Starter, Worker
from checkpointless.telemetry.events import EventLog


class NoProcesses(Starter):
    """Starts nothing; the test says what its processes do."""

    def __init__(self) -> None:
        self.coming: list[Started | Exited | Ready] = [Ready(True, (), 0.0)]
        self.signals: list[tuple[int, int]] = []

    def start(self, order: Order, descriptors: Descriptors) -> None:
        os.close(os.dup(descriptors.agent))  # it is open
        self.coming.append(Started(order.rank, order.incarnation, 1000 + order.rank))

    def signal(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))

    def news(self) -> list[Started | Exited | Ready]:
        found, self.coming = self.coming, []
        return found

    def close(self) -> None:
        """Nothing is left."""


class Node:
    """An agent of two ranks, 0 and 1, whose processes have been started."""

    def __init__(self, folder: Path) -> None:
        self.starter = NoProcesses()
        self.said: list[NodeMessage] = []
        self.selector = selectors.DefaultSelector()
        self.agent = NodeAgent(
            index=0,
            heartbeat=Heartbeat.of(10.0),
            address=lambda: LOOPBACK,
            report=self.said.append,
            selector=self.selector,
            starter=self.starter,
            fresh_starter=NoProcesses,
            make_worker=lambda rank: Worker(rank, Board.create(rank), folder / f"rank-{rank}.log"),
            rank_env={},
            events=EventLog(None),
            say=lambda line: None,
        )
        self.tick()
        assert self.said == [Joined()]
        for rank in (0, 1):
            self.agent.obey(Spawn(rank, 0, 0, "", {}))
        self.tick()

    def tick(self, after_s: float = 0.0) -> None:
        self.agent.tick(time.monotonic() + after_s)

    def ends(self, rank: int, code: int = -9) -> None:
        self.starter.coming.append(Exited(rank, self.agent.workers[rank].incarnation, 1000 + rank, code))
        self.tick()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.agent.close()
    made.selector.close()


def test_a_process_that_ended_before_all_were_done_does_not_keep_the_agent(node: Node) -> None:
    node.ends(0)
    assert isinstance(node.said[-1], RankEnded)
    node.agent.obey(AllDone())  # was under way when the process ended
    node.ends(1, 0)
    assert node.agent.alive() == []
    node.agent.obey(End(1, ["rank 0 killed by SIGKILL"]))
    assert node.agent.outcome == End(1, ["rank 0 killed by SIGKILL"])


def test_a_kill_that_comes_after_the_next_generation_began_is_ignored(node: Node) -> None:
    node.agent.obey(Begin(0, "", {}, -1, -1))
    node.agent.obey(Begin(1, "1", {}, -1, -1))
    node.agent.obey(Kill(1, 0, 0))
    assert node.starter.signals == []
    node.agent.obey(Kill(1, 0, 1))
    assert node.starter.signals == [(1001, signal.SIGKILL)]


def test_a_command_for_a_rank_that_is_not_here_is_refused(node: Node) -> None:
    with pytest.raises(ValueError, match="rank 7, which this node does not run"):
        node.agent.obey(Kill(7, 0, 0))


@pytest.mark.parametrize("grace_s", [0.0, TERM_GRACE_S])
def test_the_end_kills_who_does_not_go_in_time(node: Node, grace_s: float) -> None:
    node.agent.end(End(1, ["the coordinator was lost"]), grace_s=grace_s)
    assert node.starter.signals == [(1000, signal.SIGTERM), (1001, signal.SIGTERM)]
    node.starter.signals.clear()
    node.tick(grace_s + 0.1)
    assert node.starter.signals == [(1000, signal.SIGKILL), (1001, signal.SIGKILL)]
