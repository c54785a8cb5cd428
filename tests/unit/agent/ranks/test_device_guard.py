"""Test how an agent looks at devices before it starts a rank again, without waiting for them."""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointless.agent.node import NodeAgent
from checkpointless.agent.ranks import device_guard
from checkpointless.agent.ranks.device_guard import MAX_AGE_S, DeviceGuard
from checkpointless.agent.ranks.held_spawns import HELD_LIMIT_S, REPORT_AGAIN_S
from checkpointless.agent.ranks.local_rank import LocalRank
from checkpointless.agent.ranks.rank_log import RankLog
from checkpointless.agent.ranks.starters import Exited
from checkpointless.coordinator.hangs.policy import Heartbeat
from checkpointless.devices.health import NO_DRIVER, Device, DeviceSurvey, Problem, ProblemKind
from checkpointless.posix.errands import Errands
from checkpointless.telemetry.events import EventLog
from checkpointless.wire.address import LOOPBACK
from checkpointless.wire.board import Board
from checkpointless.wire.node_messages import DeviceBad, Joined, Kill, NodeMessage, RankEnded, Spawn
from checkpointless.wire.rank_state import RankState
from tests.unit.agent.test_node import NoProcesses

FATAL = Problem(ProblemKind.RECOVERY, "the driver wants a reset", True)
WARNING = Problem(ProblemKind.PCIE, "its PCIe link has 8 of 16 lanes", False)


def survey(*problems: tuple[Problem, ...]) -> DeviceSurvey:
    return DeviceSurvey(tuple(Device(n, f"GPU-{n}", "H100", "", found) for n, found in enumerate(problems)))


class Looks:
    """Stands in for looks at devices; a test says what they find, and may hold them up."""

    def __init__(self, found: DeviceSurvey) -> None:
        self.found = found
        self.asked: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, timeout_s: float, *, first: int = -1, **more: Any) -> DeviceSurvey:
        self.asked.append(first)
        assert self.go_on.wait(10)
        return self.found


class NoXids:
    """Stands in for the process that waits for Xids."""

    def found(self) -> frozenset[tuple[str, int]]:
        return frozenset()

    def close(self) -> None:
        """Do nothing; nothing is left."""


class Node:
    """Represents an agent of ranks 0 and 1, which use devices 1 and 0."""

    def __init__(self, folder: Path, looks: Looks, limit_s: float = 60.0) -> None:
        self.later_s = 0.0
        self.starter, self.looks = NoProcesses(), looks
        self.said: list[NodeMessage] = []
        self.printed: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.agent = NodeAgent(
            index=0,
            heartbeat=Heartbeat.of(None),
            address=lambda: LOOPBACK,
            report=self.said.append,
            selector=self.selector,
            starter=self.starter,
            fresh_starter=NoProcesses,
            make_rank=lambda rank: LocalRank(
                rank, Board.create(rank), RankLog(folder / f"rank-{rank}.log", Errands(), self.printed.append)
            ),
            rank_env={},
            events=EventLog(None),
            say=self.printed.append,
            clock=lambda: time.monotonic() + self.later_s,
            guard=DeviceGuard(
                {"CUDA_VISIBLE_DEVICES": "1,0"},
                2,
                looks,
                limit_s=limit_s,
                clock=lambda: time.monotonic() + self.later_s,
            ),
        )

    def begin(self) -> None:
        self.tick_until(lambda: self.agent.joined)
        for rank in (0, 1):
            self.spawn(rank, 0)
        self.tick_until(lambda: all(rank.pid for rank in self.agent.ranks.values()))

    def spawn(self, rank: int, incarnation: int, anyway: bool = False) -> None:
        self.agent.obey(Spawn(rank, incarnation, 0, "1", {"LOCAL_RANK": str(rank)}, anyway))

    def ends(self, rank: int, code: int = -9, words: str = "") -> None:
        self.agent.ranks[rank].last_words = words
        self.starter.coming.append(Exited(rank, self.agent.ranks[rank].incarnation, 1000 + rank, code))
        self.agent.tick(time.monotonic())
        assert isinstance(self.said[-1], RankEnded)

    def trains(self, rank: int, step: int) -> None:
        self.agent.ranks[rank].board.set_committed(step)

    def is_started(self, rank: int) -> bool:
        return self.agent.ranks[rank].pid is not None

    def tick_until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline_s
            self.agent.tick(time.monotonic())
            time.sleep(0.002)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[DeviceSurvey], Node]]:
    monkeypatch.setattr(device_guard, "XidCollector", NoXids)
    made: list[Node] = []

    def make_node(found: DeviceSurvey, **more: float) -> Node:
        made.append(Node(tmp_path, Looks(found), **more))
        return made[-1]

    yield make_node
    for node in made:
        node.looks.go_on.set()
        node.agent.close()
        node.selector.close()


def test_the_look_begins_with_the_end_of_the_process_and_holds_its_successor_alone(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.tick_until(lambda: node.looks.asked == [-1, 1])  # device 1 is that of local rank 0
    node.spawn(0, 1)
    began_s = time.monotonic()
    for _ in range(20):
        node.agent.tick(time.monotonic())
    assert time.monotonic() - began_s < 5
    assert not node.is_started(0)
    assert node.agent.ranks[0].state is RankState.STARTING
    node.looks.go_on.set()
    node.tick_until(lambda: node.is_started(0))
    assert not [message for message in node.said if isinstance(message, DeviceBad)]


def test_a_rank_is_not_started_on_a_bad_device_unless_it_is_said_so(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL, WARNING))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))
    assert node.said[-1] == DeviceBad(0, 1, "GPU 1 (H100, GPU-1)", FATAL.what)
    assert "GPU 1 (H100, GPU-1): must not be used: the driver wants a reset" in node.printed
    for _ in range(5):
        node.agent.tick(time.monotonic())
    assert isinstance(node.said[-1], DeviceBad)
    assert not node.is_started(0)
    node.spawn(0, 1, anyway=True)
    node.tick_until(lambda: node.is_started(0))


def test_the_device_of_another_rank_does_not_matter_and_a_warning_is_only_said(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((FATAL,), (WARNING,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    assert node.printed == ["GPU 1 (H100, GPU-1): warning: its PCIe link has 8 of 16 lanes"]


def test_where_there_is_no_driver_nothing_is_looked_at(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    node.ends(0)
    node.spawn(0, 1)
    node.agent.tick(time.monotonic())
    assert node.is_started(0)
    assert node.looks.asked == [-1]
    assert node.printed == []


def test_a_second_process_in_a_row_that_blames_its_device_is_evidence(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    words = "CUDA error: uncorrectable ECC error encountered"
    for incarnation, said in enumerate([words, "something else", words, words]):
        node.ends(0, 1, said)
        node.spawn(0, incarnation + 1)
        if incarnation < 3:
            node.tick_until(lambda: node.is_started(0))
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))
    assert node.said[-1] == DeviceBad(
        0, 4, "the device of local rank 0", "2 processes in a row have ended because of it"
    )


def test_processes_that_trained_before_are_no_evidence(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    for incarnation in range(4):
        node.trains(0, incarnation)
        node.ends(0, 1, "CUDA error: uncorrectable ECC error encountered")
        node.spawn(0, incarnation + 1)
        node.tick_until(lambda: node.is_started(0))
    assert not [message for message in node.said if isinstance(message, DeviceBad)]


def test_what_a_process_said_of_an_earlier_fault_is_no_evidence(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    for incarnation in range(3):
        node.agent.ranks[0].last_words = "CUDA error: uncorrectable ECC error encountered"
        node.agent.ranks[0].begin(0.0)  # it is in its block again
        node.ends(0, 1, node.agent.ranks[0].last_words)
        node.spawn(0, incarnation + 1)
        node.tick_until(lambda: node.is_started(0))
    assert not [message for message in node.said if isinstance(message, DeviceBad)]


def test_a_device_that_did_not_answer_is_looked_at_twice(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(survey((), ()))
    node.begin()
    silent = Problem(ProblemKind.SILENT, "NVML did not answer within 10 s", True)
    answers = [survey((), (silent,)), survey((), ()), survey((), (silent,)), survey((), (silent,))]
    looks = node.looks

    def answer(timeout_s: float, **more: Any) -> DeviceSurvey:
        looks.found = answers.pop(0)
        return Looks.__call__(looks, timeout_s, **more)

    guard = node.agent._processes._guard
    assert guard is not None
    guard._look = answer
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    assert len(answers) == 2
    node.ends(0)
    node.spawn(0, 2)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))
    assert answers == []


def test_ranks_that_end_together_share_a_look_and_one_that_ends_later_has_its_own(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.go_on.clear()
    for rank in (0, 1):
        node.ends(rank)
        node.spawn(rank, 1)
    node.tick_until(lambda: len(node.looks.asked) == 2)
    node.looks.go_on.set()
    node.tick_until(lambda: node.is_started(0) and node.is_started(1))
    assert len(node.looks.asked) == 2, "the first look, and one for both"
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 2)
    node.tick_until(lambda: len(node.looks.asked) == 3)
    node.ends(1)  # what was seen so far may be older than that
    node.spawn(1, 2)
    node.tick_until(lambda: len(node.looks.asked) == 4)
    node.looks.go_on.set()
    node.tick_until(lambda: node.is_started(0) and node.is_started(1))


def test_what_was_seen_long_ago_or_for_a_process_that_was_killed_does_not_count(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.tick_until(lambda: len(node.looks.asked) == 2)
    node.looks.found = survey((), ())
    node.later_s += MAX_AGE_S + 1
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 2)
    node.tick_until(lambda: len(node.looks.asked) == 4)
    node.looks.found = survey((), ())
    node.agent.obey(Kill(0, 2, -1))
    node.spawn(0, 3)
    node.tick_until(lambda: node.is_started(0))
    assert not [message for message in node.said if isinstance(message, DeviceBad)]


def test_a_first_look_that_is_not_complete_is_made_again_and_no_machine_is_refused_for_silence(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    silent = Problem(ProblemKind.SILENT, "NVML did not answer within 10 s", True)
    node = make(replace(survey((), (silent,)), error="NVML did not answer within 10 s"))
    node.tick_until(lambda: node.agent.joined)
    assert node.looks.asked == [-1, -1]
    assert node.said == [Joined()]
    for rank in (0, 1):
        node.spawn(rank, 0)
    node.tick_until(lambda: all(rank.pid for rank in node.agent.ranks.values()))
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))


def test_without_threads_nothing_is_looked_at(
    make: Callable[[DeviceSurvey], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(survey((), ()))
    node.begin()

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(device_guard.threading, "Thread", NoThread)
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    assert node.printed == ["warning: the devices cannot be looked at: can't start new thread"]


def test_no_start_is_held_for_longer_than_its_limit(make: Callable[..., Node]) -> None:
    node = make(survey((), ()), limit_s=1e6)
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 1)
    node.later_s += HELD_LIMIT_S
    node.tick_until(lambda: node.is_started(0))
    assert "is used without a look" in node.printed[-1]


def test_a_refused_device_is_reported_again_until_it_is_answered_or_in_order(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    reports = [DeviceBad(0, 1, "GPU 1 (H100, GPU-1)", FATAL.what)]

    def reported() -> list[NodeMessage]:
        return [message for message in node.said if isinstance(message, DeviceBad)]

    node.tick_until(lambda: reported() == reports)
    node.agent.standing()  # to a coordinator that has not heard of it
    node.tick_until(lambda: reported() == 2 * reports)
    node.later_s += REPORT_AGAIN_S
    node.tick_until(lambda: reported() == 3 * reports)
    node.looks.found = survey((), ())
    node.later_s += REPORT_AGAIN_S
    node.tick_until(lambda: node.is_started(0))
    node.spawn(0, 1, anyway=True)  # the answer crosses the start
    node.agent.tick(time.monotonic())
    assert node.agent.outcome is None


def test_a_process_that_is_killed_meanwhile_is_not_started_anyway(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))
    node.agent.obey(Kill(0, 1, -1))
    node.spawn(0, 1, anyway=True)
    node.agent.tick(time.monotonic())
    assert not node.is_started(0)
    node.looks.found = survey((), ())
    node.spawn(0, 2)
    node.tick_until(lambda: node.is_started(0))


def test_a_look_that_fails_at_the_begin_is_said_and_made_again(make: Callable[[DeviceSurvey], Node]) -> None:
    error = "the process that asks NVML did not start within 10 s"
    node = make(DeviceSurvey(error=error))
    node.begin()
    assert node.printed == [f"warning: {error}"]
    node.looks.found = survey((), (FATAL,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))


def test_a_look_that_is_never_over_holds_nothing(make: Callable[..., Node]) -> None:
    node = make(survey((), ()), limit_s=0.3)
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    assert node.printed == ["warning: the look at the devices was not over within 0.3 s"]


def test_an_xid_that_comes_during_the_look_counts(
    make: Callable[[DeviceSurvey], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(survey((), ()))
    node.begin()
    found: set[tuple[str, int]] = set()
    monkeypatch.setattr(NoXids, "found", lambda self: frozenset(found))

    def look(timeout_s: float, *, xids: Callable[[], Any], **more: Any) -> DeviceSurvey:
        found.add(("GPU-1", 79))
        return survey((), (FATAL,) if xids() else ())

    guard = node.agent._processes._guard
    assert guard is not None
    guard._look = look
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: isinstance(node.said[-1], DeviceBad))


def test_a_held_process_that_is_killed_has_ended(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 1)
    node.agent.obey(Kill(0, 1, -1))
    assert isinstance(node.said[-1], RankEnded)
    assert node.said[-1].forgiven
    assert node.agent.ranks[0].state is RankState.GONE
    node.looks.go_on.set()
    for _ in range(5):
        node.agent.tick(time.monotonic())
    assert not node.is_started(0)


def test_a_node_joins_with_what_is_wrong_with_the_devices_of_its_ranks(
    make: Callable[[DeviceSurvey], Node],
) -> None:
    node = make(survey((), (FATAL,), (FATAL,)))
    node.tick_until(lambda: node.agent.joined)
    assert node.said == [Joined("GPU 1 (H100, GPU-1): the driver wants a reset")]


def test_a_node_joins_once_its_devices_are_known(make: Callable[[DeviceSurvey], Node]) -> None:
    node = make(survey((), ()))
    node.tick_until(lambda: node.agent.joined)
    assert node.said == [Joined()]
