"""Test what the demo says when a run fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from checkpointless.cli.commands.demo import _run_demo
from checkpointless.testing import jobs
from checkpointless.testing.demo.trainers import TRAINERS, Task
from checkpointless.testing.jobs import Ended, Job


def test_a_demo_whose_first_run_fails_makes_no_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Job] = []

    def fail(jobs_to_run: Sequence[Job], tell: Callable[[str], None]) -> list[Ended]:
        started.extend(jobs_to_run)
        tell("rank 1 raised ValueError")
        return [Ended(jobs_to_run[0].name, jobs_to_run[0].configs[0].run_dir, 1, 0, 1.0)]

    monkeypatch.setattr(jobs, "run_jobs", fail)
    assert _run_demo(TRAINERS["ddp"], Task(nproc=2, steps=3), [], tmp_path / "runs") == 1
    said = capsys.readouterr().err.replace("\n", " ")
    assert [job.name for job in started] == ["undisturbed"]
    assert "rank 1 raised ValueError" in said
    assert "ended with exit code 1; its logs" in said
