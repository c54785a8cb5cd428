"""Test the last line of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.cli.terminal import Terminal
from checkpointless.observability.telemetry.events import EVENTS_FILE
from tests.unit.made_up_run import MadeUpRun


def closing_line(run_dir: Path, status: int) -> str:
    return Terminal(print, run_dir, 0).closing_line(status)


def test_it_says_steps_incidents_seconds_and_where_the_report_is(tmp_path: Path) -> None:
    run = MadeUpRun()
    run.start(at_s=10)
    took_s = [run.incident(31.0, "1", committed=21) - 31.1, run.incident(51.0, "2", committed=41) - 51.1]
    run.end(100.0, step=85)
    line = closing_line(run.write(tmp_path / "run"), 0)
    assert line == (
        f"done: 85 steps, 2 incidents, {sum(took_s):.2f} s lost; report: checkpointless report {tmp_path / 'run'}"
    )


def test_only_the_steps_of_this_run_count(tmp_path: Path) -> None:
    run = MadeUpRun(ranks=1)
    run.span(10.0, "first_step", 0, step=101)
    run.end(20.0, step=140)
    assert closing_line(run.write(tmp_path / "a run"), 1) == (
        f"failed: 40 steps, no incidents; report: checkpointless report '{tmp_path / 'a run'}'"
    )


def test_a_job_without_steps_and_incidents_says_nothing_and_one_with_incidents_counts_these(tmp_path: Path) -> None:
    run = MadeUpRun()
    run.add(0.0, "job", "begin", nproc=2)
    run.end(9.0)
    assert closing_line(run.write(tmp_path / "a"), 0) == ""
    run.events.pop()
    run.add(4.0, "detect", "point", incident="1", cause="rank 1 failed", culprit=1, how="exception")
    run.end(9.0, code=1, reason="no")
    assert closing_line(run.write(tmp_path / "b"), 1).startswith("failed: 1 incident, 5.00 s lost; report: ")


def test_a_log_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / EVENTS_FILE).mkdir()
    assert closing_line(tmp_path, 0).startswith("done: its log cannot be read: Is a directory; report: ")
