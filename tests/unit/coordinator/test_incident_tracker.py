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


def test_of_several_causes_the_earliest_fault_counts(tracked: Tracked) -> None:
    tracked.fault(Cause(CauseKind.VICTIM, 0, "exception", "raised", 7))
    tracked.tracker.add_cause(HANG, time.monotonic() - 9)
    tracked.tracker.add_cause(HANG, time.monotonic() - 3)
    assert tracked.tracker.open is not None
    assert tracked.tracker.open.fault_at_s <= time.monotonic() - 9


def test_a_fault_that_was_noticed_at_once_says_nothing_of_when_it_happened(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    (detect,) = tracked.events("detect")
    assert "undetected_s" not in detect.fields


def test_without_a_step_the_next_fault_escalates_the_incident(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(NO_STEP, NO_STEP, target=1)
    tracked.fault(ERROR)
    tracked.regroup(NO_STEP, NO_STEP, target=1)
    assert tracked.said[-1] == "incident 1: escalated: incident 2 came before a step was made"
    assert not any("recovered" in line for line in tracked.said)
    (event,) = tracked.events("escalated")
    assert event.incident == "1"


def test_a_step_that_only_the_boards_tell_of_was_made_before_the_next_fault(tracked: Tracked) -> None:
    tracked.fault(HANG, time.monotonic() - 7)
    tracked.regroup(high_water=6, oldest=6, target=7)
    tracked.fault(ERROR)
    tracked.regroup(high_water=7, oldest=7, target=8)
    assert tracked.said[-1].startswith("incident 1: recovered in ")
    assert tracked.events("escalated") == []


def test_at_the_end_of_the_block_no_step_was_left(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(high_water=12, oldest=12, target=13)
    tracked.tracker.recovered(12)
    assert tracked.said[-1].endswith("; nothing was lost; no step was left to make")


def test_where_steps_are_not_known_an_incident_lasts_until_all_ranks_are_in_their_block(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(NO_STEP, NO_STEP, target=1)
    time.sleep(0.5)
    tracked.tracker.recovered(NO_STEP)
    (event,) = tracked.events("recovered")
    (detect,) = tracked.events("detect")
    assert event.fields["seconds"] < (event.ts - detect.ts) / 1e9 - 0.15
    assert tracked.said[-1].endswith("(in-process)")


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


def test_a_word_of_an_older_generation_is_ignored(tracked: Tracked) -> None:
    tracked.fault(ERROR)
    tracked.regroup(high_water=6, oldest=6, target=7)
    tracked.tracker.not_exact(1, generation=0, reason="step 7 has another loss")
    tracked.tracker.recovered(7)
    assert tracked.said[-1].endswith("nothing was lost")
    assert tracked.tracker.inexact == 0


def test_a_coordinator_that_has_taken_the_job_over_says_it_without_the_incident(tracked: Tracked) -> None:
    tracked.tracker.adopt(3, 3)
    tracked.tracker.not_exact(1, generation=3, reason="step 7 has another loss")
    assert tracked.said == ["the job is not exact since its last incident: rank 1: step 7 has another loss"]
