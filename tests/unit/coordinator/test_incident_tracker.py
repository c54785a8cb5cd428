"""Test from when a fault counts, and when an incident is over."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from checkpointless.launcher.coordinator.job import _IncidentTracker
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, EventLog, read_events

HANG = Cause(CauseKind.LOSS, 1, "hang", "made no progress for 5 s", 7)
ERROR = Cause(CauseKind.EXCEPTION, 0, "exception", "raised ValueError", NO_STEP, error="ValueError")


class Tracked:
    """A tracker, what it said, and its events."""

    def __init__(self, run_dir: Path) -> None:
        self.said: list[str] = []
        self.run_dir = run_dir
        self.tracker = _IncidentTracker(None, EventLog(run_dir / EVENTS_FILE), self.said.append)

    def fault(self, cause: Cause, since_s: float | None = None) -> None:
        self.tracker.begin(cause, since_s)
        self.tracker.add_cause(cause, since_s)

    def regroup(self, high_water: int, oldest: int, target: int) -> None:
        self.tracker.gathered(high_water, oldest)
        self.tracker.regrouped(self.tracker.generation + 1, target)

    def events(self, stage: str) -> list[Event]:
        return [event for event in read_events(self.run_dir) if event.stage == stage]


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    tracked = Tracked(tmp_path)
    tracked.tracker.generation = 0
    return tracked


def test_a_hang_counts_from_the_last_progress_everywhere(tracked: Tracked) -> None:
    tracked.fault(HANG, time.monotonic() - 7)
    (detect,) = tracked.events("detect")
    assert 7 <= detect.fields["undetected_s"] < 67
    tracked.regroup(high_water=6, oldest=6, target=7)
    tracked.tracker.recovered(7)
    (recovered,) = tracked.events("recovered")
    assert 7 <= recovered.fields["seconds"] < 67
    assert (recovered.fields["step"], recovered.fields["made"]) == (7, True)
    assert (
        tracked.said[-1]
        == f"incident 1: recovered in {recovered.fields['seconds']:.2f} s (in-process); nothing was lost"
    )


def test_without_a_step_the_next_fault_escalates_the_incident(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(NO_STEP, NO_STEP, target=1)
    tracked.fault(ERROR)
    tracked.regroup(NO_STEP, NO_STEP, target=1)
    assert tracked.said[-1] == "incident 1: escalated: incident 2 came before a step was made"
    assert not any("recovered" in line for line in tracked.said)
    (event,) = tracked.events("escalated")
    assert event.incident == "1"


def test_what_is_not_exact_is_in_the_last_line(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(high_water=6, oldest=6, target=7)
    for rank in (1, 0, 1):
        tracked.tracker.not_exact(rank, generation=1, reason="step 7 takes another batch")
    tracked.tracker.recovered(7)
    assert tracked.said[-1].startswith("incident 1: resumed, not exact, in ")
    assert tracked.said[-1].endswith(" s (in-process); rank 0: step 7 takes another batch (1 other rank too)")
    (recovered,) = tracked.events("recovered")
    assert recovered.fields["inexact"] == "rank 0: step 7 takes another batch (1 other rank too)"
    assert tracked.tracker.inexact == 1


def test_a_second_line_corrects_the_last_one_once(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(high_water=6, oldest=4, target=5)
    tracked.tracker.recovered(5)
    before = len(tracked.said)
    for rank in (1, 0):
        tracked.tracker.not_exact(rank, generation=1, reason="step 6 has another loss")
    assert tracked.said[before:] == ["incident 1: resumed, not exact: rank 1: step 6 has another loss"]
    assert tracked.tracker.inexact == 1
