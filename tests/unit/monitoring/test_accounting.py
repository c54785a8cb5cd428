"""Test that the metrics account for a run's time as its report does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from checkpointless.observability.monitoring import accounting
from checkpointless.observability.monitoring.accounting import Account, Accounting
from checkpointless.observability.monitoring.prometheus import render
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import (
    EVENTS_FILE,
    Event,
    EventLog,
    append_line,
    flush_events,
    read_events,
)
from tests.unit.made_up_run import MadeUpRun
from tests.unit.monitoring.http_exchange import SNAPSHOT


def write(run_dir: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write events into a log, at the times that they have."""
    for event in events:
        with monkeypatch.context() as patch:
            patch.setattr("time.time_ns", lambda ns=event.ts: ns)
            patch.setattr("time.monotonic_ns", lambda ns=event.mono: ns)
            EventLog(run_dir / EVENTS_FILE, node=event.node, rank=event.rank).emit(
                event.stage,  # type: ignore[arg-type]
                event.edge,
                generation=event.generation,
                incident=event.incident,
                **event.fields,
            )
    assert flush_events()


def disturbed_run() -> MadeUpRun:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, resumed=15)
    run.add(100.0, "progress", "point", high_water=60)
    return run


def test_the_account_is_that_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = disturbed_run()
    write(tmp_path, run.events[:30], monkeypatch)
    reader = Accounting(tmp_path / EVENTS_FILE)  # what was written before it began belongs to the run, too
    reader.look(0.0)
    write(tmp_path, run.events[30:], monkeypatch)
    reader.look(1e9)
    report = build_report(str(tmp_path), read_events(tmp_path))
    assert report.spent is not None
    found = reader.account
    assert (found.ettr, found.ettr_while_training) == (report.spent.ettr, report.spent.ettr_while_training)
    assert found.ettr is not None
    assert found.step_s == report.run.step_s is not None
    assert found.spent_s["recovery"] == report.spent.recovery_s > 0
    assert found.spent_s["repeated"] == report.spent.repeated_s
    assert (found.first_step, found.last_step, found.steps) == (1, 60, 60)


def test_steps_are_counted_from_the_first_one_of_the_job_and_never_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MadeUpRun(ranks=1)
    run.add(1.0, "first_step", "end", 0, step=101)  # the script resumed from a checkpoint of step 100
    write(tmp_path, run.events, monkeypatch)
    reader = Accounting(tmp_path / EVENTS_FILE)
    monkeypatch.setattr(reader, "asked", lambda: None)
    assert reader.ask(None).steps is None
    reader.look(0.0)
    assert reader.ask(None).steps == 1
    assert reader.ask(110).steps == 10
    assert reader.ask(105).steps == 10  # the job fell back to storage


def test_an_account_is_made_only_if_something_was_written_and_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(run_dir: str, events: list[Event]) -> Account:
        made.append(len(events))
        return Account()

    monkeypatch.setattr(accounting, "account_of", counted)
    run, reader = disturbed_run(), Accounting(tmp_path / EVENTS_FILE)
    write(tmp_path, run.events[:5], monkeypatch)
    for now_s in (0.0, 1e6, 2e6):
        reader.look(now_s)
    assert made == [5]
    write(tmp_path, run.events[5:7], monkeypatch)
    reader.look(0.0)
    assert made == [5], "the last one is not paid for yet"
    reader.look(3e6)
    assert made == [5, 7]


def test_a_log_that_is_too_long_has_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accounting, "MAX_EVENTS", 10)
    reader = Accounting(tmp_path / EVENTS_FILE)
    append_line(tmp_path / EVENTS_FILE, "no event")
    write(tmp_path, disturbed_run().events[:11], monkeypatch)
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 1e6):
            reader.look(now_s)
    assert reader.account == Account()
    assert caplog.text.count("over 10 events") == 1
    assert b"ettr_ratio{" not in render(SNAPSHOT, None, reader.account)
