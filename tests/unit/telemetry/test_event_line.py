"""Test that odd lines of the event log end nothing: they are left out, or have the types that readers expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpointless.cli.terminal import _Narrator
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.report.trace import write_trace
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, read_events
from tests.unit.report.reports import as_json, html_page, simple_run

GOOD: dict[str, Any] = {
    **{"ts": 1_700_000_000_000_000_000, "mono": 5, "node": 0, "rank": 1, "pid": 7, "generation": 0},
    **{"incident": "1", "stage": "detect", "edge": "point", "cause": "x", "culprit": 1, "how": "exit"},
}


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


@pytest.mark.parametrize(
    "odd",
    [
        line(ts=float("inf")),
        line(ts=10**400),
        line(ts=2**63),
        line(ts=-1),
        line(ts=1.5),
        line(mono="1"),
        line(generation=float("nan")),
        line(generation=True),
        line(incident=[1]),
        line(incident={"a": 1}),
        line(edge="middle"),
        line(stage=None),
        line(seconds="NaN"),
        line(seconds=-1),
        line(undetected_s=1e300),
        line(ranks="all"),
        line(bytes=10**30),
        b'{"a":' * 200_000,
        b"[" * 200_000,
        line().replace(b'"x"', b"9" * 5000),
        line().replace(b'"x"', b"\xff"),
        b'["detect"]',
        b"7",
        b"",
    ],
)
def test_what_is_no_event_is_none(odd: bytes) -> None:
    assert Event.parse(odd) is None


def test_text_that_is_no_utf8_and_fields_of_newer_versions_are_kept() -> None:
    event = Event.parse(line(cause="\udc80\x1b[2J", stage="new", later={"a": [1, None, 1.5]}))
    assert event is not None
    assert (event.stage, event.fields["cause"], event.fields["later"]) == (
        "new",
        "\udc80\x1b[2J",
        {"a": [1, None, 1.5]},
    )


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, -1, 10**30, 0]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\x1b[2J", "<b>", "\udc80", "NaN", "{{ 7 }}"]),
    st.lists(st.integers(0, 3) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
TIMES = "seconds", "step", "target", "bytes", "high_water", "undetected_s", "steps_lost", "nproc"
WORDS = "sources", "tier", "rung", "why", "reason", "error", "made", "code", "ranks", "spec", "path", "is_final"
FIELDS = *GOOD, *TIMES, *WORDS


@example([(EventName.JOB, "end", {"seconds": None})])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*EventName]),
            st.sampled_from(["begin", "end", "point"]),
            st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=4),
        ),
        max_size=12,
    )
)
def test_odd_fields_end_neither_report_nor_narration(
    tmp_path: Path, odd: list[tuple[EventName, str, dict[str, Any]]]
) -> None:
    run, _ = simple_run()
    lines = [line(**{"stage": stage, "edge": edge, **changes}) for stage, edge, changes in odd]
    (tmp_path / EVENTS_FILE).write_bytes(b"\n".join([*lines, b""]))
    events = [*run.events, *read_events(tmp_path)]
    report = build_report("r", events)
    json.loads(as_json(report))
    json.loads(write_trace(report, events))
    html_page(report, {})
    narrator = _Narrator(tmp_path, 0, 7)
    for event in events:
        list(narrator.take(event, 0.0))
    list(narrator.tick(100.0))
