"""Test that differences of event times can be believed, whatever became of wall clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.observability.report.incidents import Outcome, summarize
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import Event, on_one_timeline
from tests.unit.made_up_run import MadeUpRun, S

HOUR = 3600 * S


def made_up(per_node: int = 8) -> list[Event]:
    run = MadeUpRun(ranks=2, per_node=per_node)
    for rank in range(2):
        run.span(9.0, "barrier", rank)
    run.add(9.0, "go", "point", high_water=-1)
    run.start(at_s=10)
    run.incident(31.0, "1", committed=21, how="exception")
    run.end(100.0, step=85)
    return sorted(run.events, key=lambda event: event.ts)


def with_wall_clock(events: list[Event], ahead: Callable[[Event], int]) -> list[Event]:
    return [replace(event, ts=event.ts + ahead(event)) for event in events]


@pytest.mark.parametrize(
    "ahead",
    [
        lambda event: -HOUR if event.mono > 32 * S else 0,  # set back in the middle of the recovery
        lambda event: HOUR if event.mono > 32 * S else 0,
        lambda event: HOUR if 32 * S < event.mono < 32.5 * S else 0,  # set, and set back
        lambda event: -HOUR if event.pid == 1001 else 0,  # of one process alone
    ],
)
def test_a_wall_clock_that_is_set_changes_no_duration(ahead: Callable[[Event], int]) -> None:
    undisturbed = made_up()
    (expected,) = summarize(undisturbed)
    events = on_one_timeline(with_wall_clock(undisturbed, ahead))
    (found,) = summarize(events)
    assert found.outcome is Outcome.RESUMED
    assert (found.headline_s, found.stages_s, found.tiles_s) == (
        expected.headline_s,
        expected.stages_s,
        expected.tiles_s,
    )
    report = build_report("r", events)
    assert report.spent is not None
    assert report.spent.wall_s == pytest.approx(100.0)


@pytest.mark.parametrize("ahead_s", [3600, -3600, 5])
def test_a_node_whose_clock_is_wrong_all_along_is_set_right_by_the_coordinators_go(ahead_s: int) -> None:
    undisturbed = made_up(per_node=1)
    (expected,) = summarize(undisturbed)
    other_boot = [replace(e, mono=e.mono + 77 * HOUR) if e.node == 1 else e for e in undisturbed]
    events = on_one_timeline(with_wall_clock(other_boot, lambda event: ahead_s * S * event.node))
    (found,) = summarize(events)
    assert found.headline_s == pytest.approx(expected.headline_s, abs=0.2)


def test_another_machine_in_a_nodes_place_has_a_monotonic_clock_of_its_own() -> None:
    events = made_up()
    moved = [replace(event, mono=event.mono + 50 * HOUR) if event.mono > 40 * S else event for event in events]
    assert [event.ts for event in on_one_timeline(moved)] == [event.ts for event in events]


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(-1, 2)), max_size=20))
def test_any_times_are_put_somewhere(times: list[tuple[int, int, int]]) -> None:
    events = [Event(ts, mono, node, 0, 1, 0, None, "barrier", "end") for ts, mono, node in times]
    assert len(on_one_timeline(events)) == len(events)
