"""Test the event log and the step log, written and read back."""

import enum
from pathlib import Path

import pytest

from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, EventLog, read_events
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.observability.telemetry.steps import StepLog, StepRecord, read_steps


def test_events_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS_FILE, node=3, rank=1)
    log.emit(EventName.DETECT, "point", generation=2, incident="i1", cause="boom", culprit=0)
    log.emit(EventName.RESPAWN, "point", generation=2, rank=5)
    detect, respawn = read_events(tmp_path)
    assert (detect.node, detect.rank, detect.generation, detect.incident) == (3, 1, 2, "i1")
    assert detect.fields == {"cause": "boom", "culprit": 0}
    assert (respawn.rank, respawn.incident) == (5, None)
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
    assert (begin.edge, end.edge) == ("begin", "end")
    assert end.fields["bytes"] == 7
    assert end.fields["error"] == "ValueError: no"
    assert end.fields["seconds"] >= 0


def test_what_has_no_json_form_becomes_text(tmp_path: Path) -> None:
    color = enum.Enum("color", {"RED": "red"})
    log = EventLog(tmp_path / EVENTS_FILE)
    log.emit(
        EventName.DATA,
        "point",
        generation=0,
        a=float("nan"),
        b=Path("/p"),
        c={2, 1},
        d=(1, color["RED"]),
        e={1: None},
    )
    (event,) = read_events(tmp_path)
    assert event.fields == {"a": "nan", "b": "/p", "c": [1, 2], "d": [1, "red"], "e": {"1": None}}


@pytest.mark.parametrize("kept", [1, 40, 150, -1])
def test_a_line_behind_the_beginning_of_one_whose_writer_was_killed_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: int
) -> None:
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
    assert read_steps(tmp_path) == {
        3: [StepRecord(1, (0.1).hex(), "d1"), StepRecord(2, "nan", "d2"), StepRecord(2, (0.1 + 0.2).hex(), "d2")]
    }
