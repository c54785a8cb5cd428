"""Test how an agent looks at devices before it starts a rank again, without waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checkpointless.agent.ranks import device_guard
from checkpointless.agent.ranks.device_guard import MAX_AGE_S
from checkpointless.devices.health import NO_DRIVER, DeviceSurvey, Problem, ProblemKind
from checkpointless.wire.node_messages import DeviceBad, Joined, Kill
from checkpointless.wire.rank_state import RankState
from tests.unit.agent.ranks.guarded_node import FATAL, WARNING, GuardedNode, Looks, NoXids, survey


def test_the_look_begins_with_the_end_of_the_process_and_holds_its_successor_alone(
    make: Callable[[DeviceSurvey], GuardedNode],
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


def test_the_device_of_another_rank_does_not_matter_and_a_warning_is_only_said(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
    node = make(survey((), ()))
    node.begin()
    node.looks.found = survey((FATAL,), (WARNING,))
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    assert node.printed == ["GPU 1 (H100, GPU-1): warning: its PCIe link has 8 of 16 lanes"]


def test_where_there_is_no_driver_nothing_is_looked_at(make: Callable[[DeviceSurvey], GuardedNode]) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    node.ends(0)
    node.spawn(0, 1)
    node.agent.tick(time.monotonic())
    assert node.is_started(0)
    assert node.looks.asked == [-1]
    assert node.printed == []


def test_a_second_process_in_a_row_that_blames_its_device_is_evidence(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
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


def test_processes_that_trained_before_are_no_evidence(make: Callable[[DeviceSurvey], GuardedNode]) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    for incarnation in range(4):
        node.trains(0, incarnation)
        node.ends(0, 1, "CUDA error: uncorrectable ECC error encountered")
        node.spawn(0, incarnation + 1)
        node.tick_until(lambda: node.is_started(0))
    assert not [message for message in node.said if isinstance(message, DeviceBad)]


def test_what_a_process_said_of_an_earlier_fault_is_no_evidence(
    make: Callable[[DeviceSurvey], GuardedNode],
) -> None:
    node = make(DeviceSurvey(error=NO_DRIVER))
    node.begin()
    for incarnation in range(3):
        node.agent.ranks[0].last_words = "CUDA error: uncorrectable ECC error encountered"
        node.agent.ranks[0].begin(0.0)  # it is in its block again
        node.ends(0, 1, node.agent.ranks[0].last_words)
        node.spawn(0, incarnation + 1)
        node.tick_until(lambda: node.is_started(0))
    assert not [message for message in node.said if isinstance(message, DeviceBad)]


def test_a_device_that_did_not_answer_is_looked_at_twice(make: Callable[[DeviceSurvey], GuardedNode]) -> None:
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
    make: Callable[[DeviceSurvey], GuardedNode],
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
    make: Callable[[DeviceSurvey], GuardedNode],
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
    make: Callable[[DeviceSurvey], GuardedNode],
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
    make: Callable[[DeviceSurvey], GuardedNode], monkeypatch: pytest.MonkeyPatch
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
    assert "warning: the devices cannot be looked at: can't start new thread" in node.printed


def test_a_look_that_is_never_over_holds_nothing(make: Callable[..., GuardedNode]) -> None:
    node = make(survey((), ()), limit_s=0.3)
    node.begin()
    node.looks.go_on.clear()
    node.ends(0)
    node.spawn(0, 1)
    node.tick_until(lambda: node.is_started(0))
    assert node.printed == ["warning: the look at the devices was not over within 0.3 s"]


def test_an_xid_that_comes_during_the_look_counts(
    make: Callable[[DeviceSurvey], GuardedNode], monkeypatch: pytest.MonkeyPatch
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
