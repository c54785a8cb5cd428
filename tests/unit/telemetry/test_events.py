"""Test the event log and the step log, written and read back; odd lines of them end nothing."""

import enum
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpointless.cli.terminal import _Narrator
from checkpointless.observability.monitoring.metrics import MEASURED_STAGES
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.report.trace import write_trace
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, EventLog, read_events
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.observability.telemetry.steps import StepLog, StepRecord, read_steps
from tests.unit.report.reports import as_json, html_page, simple_run


def test_events_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS_FILE, node=3, rank=1)
    log.emit(EventName.DETECT, "point", generation=2, incident="i1", cause="boom", culprit=0)
    log.emit(EventName.RESPAWN, "point", generation=2, rank=5)
    detect, respawn = read_events(tmp_path)
    assert (detect.node, detect.rank, detect.generation, detect.incident) == (3, 1, 2, "i1")
    assert (detect.fields, respawn.rank, respawn.incident) == ({"cause": "boom", "culprit": 0}, 5, None)
    assert detect.ts <= respawn.ts
    assert detect.mono <= respawn.mono


def test_a_span_says_how_long_it_took_and_what_broke_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)

    def fails() -> None:
        with log.span(EventName.TRANSFER, generation=1) as more:
            more["bytes"] = 7
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    begin, end = read_events(tmp_path)
    assert (begin.edge, end.edge, end.fields["bytes"], end.fields["error"]) == ("begin", "end", 7, "ValueError: no")
    assert end.fields["seconds"] >= 0


def test_what_has_no_json_form_becomes_text(tmp_path: Path) -> None:
    color = enum.Enum("color", {"RED": "red"})
    log = EventLog(tmp_path / EVENTS_FILE)
    odd: dict[str, Any] = {"a": float("nan"), "b": Path("/p"), "c": {2, 1}, "d": (1, color["RED"]), "e": {1: None}}
    log.emit(EventName.DATA, "point", generation=0, **odd)
    (event,) = read_events(tmp_path)
    assert event.fields == {"a": "nan", "b": "/p", "c": [1, 2], "d": [1, "red"], "e": {"1": None}}


@pytest.mark.parametrize("kept", [1, 40, 150, -1])
def test_a_line_behind_a_torn_one_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)
    log.emit(EventName.DATA, "point", generation=0, nested={"a": {"b": 1}})
    assert scribe.flush()
    torn = (tmp_path / EVENTS_FILE).read_bytes()[:-1][:kept]
    (tmp_path / EVENTS_FILE).write_bytes(torn)
    log.emit(EventName.INIT, "point", generation=1, nested={"a": {"b": 2}})
    log.emit(EventName.INIT, "point", generation=2)
    assert [event.generation for event in read_events(tmp_path)] == [1, 2]
    assert not caplog.records
    (line, _) = (tmp_path / EVENTS_FILE).read_bytes().splitlines()
    found = Event.parse(line)
    assert found is not None
    assert found.fields == {"nested": {"a": {"b": 2}}}


def test_a_broken_line_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path / EVENTS_FILE)
    log.emit(EventName.INIT, "point", generation=0)
    assert scribe.flush()
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"half": \n[1]\n{"stage": "x"}\n')
    log.emit(EventName.DATA, "point", generation=0)
    assert [event.stage for event in read_events(tmp_path)] == ["init", "data"]
    (record,) = caplog.records
    assert "3 lines, from line 2 on, are no events" in record.getMessage()


def test_steps_are_kept_over_a_new_process_and_to_the_bit(tmp_path: Path) -> None:
    StepLog(tmp_path, 3).record(1, 0.1, "d1")
    path = tmp_path / "steps" / "rank-3.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    successor = StepLog(tmp_path, 3)
    assert successor.last_step() == 1
    successor.record(2, float("nan"), "d2")
    successor.record(2, 0.1 + 0.2, "d2")
    recorded = ((1, (0.1).hex(), "d1"), (2, "nan", "d2"), (2, (0.1 + 0.2).hex(), "d2"))
    assert read_steps(tmp_path) == {3: [StepRecord(*each) for each in recorded]}


def test_names_that_are_no_utf8_are_recorded(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.ckpt")
    log = StepLog(tmp_path, 0)
    log.record(1, 0.5, "d1", own={name: "d2"})
    log.record_validation(1, {name: 0.5}, {})
    log.record_checkpoints([[name]])
    found = read_steps(tmp_path)
    assert (found[0][0].own, found.validations[0][0].metrics) == ({name: "d2"}, {name: (0.5).hex()})
    assert found.checkpoints == ((name,),)


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
    assert (event.stage, event.fields["cause"]) == ("new", "\udc80\x1b[2J")
    assert event.fields["later"] == {"a": [1, None, 1.5]}


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
FIELDS = st.dictionaries(st.sampled_from([*GOOD, *TIMES, *WORDS]), ODD, max_size=4)
ODD_EVENTS = st.tuples(st.sampled_from(EventName), st.sampled_from(["begin", "end", "point"]), FIELDS)


@example([(EventName.JOB, "end", {"seconds": None})])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(ODD_EVENTS, max_size=12))
def test_odd_fields_end_no_reader(tmp_path: Path, odd: list[tuple[EventName, str, dict[str, Any]]]) -> None:
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


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", EventName)
def test_a_member_is_written_as_its_name_and_read_as_itself(tmp_path: Path, name: EventName) -> None:
    EventLog(tmp_path / EVENTS_FILE).emit(name, "point", generation=0, again=name)
    assert scribe.flush()
    line = (tmp_path / EVENTS_FILE).read_bytes()
    assert re.search(rb'"incident":null,"stage":"([a-z_]+)","edge":"point","again":"\1"}\n$', line)
    assert json.loads(line)["stage"] == name.value == str(name) == f"{name}"
    (event,) = read_events(tmp_path)
    assert event.stage is name


@pytest.mark.parametrize(
    ("page", "names"), [("architecture", STAGES), ("concepts", STAGES), ("operations", MEASURED_STAGES)]
)
def test_the_docs_name_the_stages(page: str, names: tuple[EventName, ...]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert not [name for name in names if f"`{name}`" not in text]
