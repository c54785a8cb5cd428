"""Test standbys under a real agent: they take the place of ranks that die, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks.agent_job import Ended, Job, is_alive, wait_until

pytestmark = pytest.mark.ranks

FORKED: dict[str, Any] = {"preload": ("torch",)}
FRESH: dict[str, Any] = {"preload": ("numpy", "sets_up_cuda")}
BOTH = pytest.mark.parametrize("mode", [FORKED, FRESH], ids=["forked", "fresh"])


def start(run_dir: Path, *faults: str, warm_spares: int = 1, script: str = "steps.py", **options: Any) -> Job:
    """Start a job that makes its faults when the test has made the file ``gate``."""
    return Job(run_dir, script, *faults, warm_spares=warm_spares, **options)


def standbys(job: Job, fate: str = "ready") -> list[int]:
    """Return the numbers of the standbys of which this was told so far."""
    return [event.fields["process"] for event in job.events("standby") if event.fields["fate"] == fate]


def wait_for_standbys(job: Job, count: int) -> list[int]:
    wait_until(lambda: len(standbys(job)) >= count)
    return standbys(job)


def end(job: Job) -> Ended:
    (job.run_dir / "gate").touch()
    ended = job.end()
    assert ended.code == 0, ended.err
    return ended


def places(job: Job) -> list[tuple[int, bool]]:
    """Return which ranks got new processes, and which of these had been standbys."""
    return [(event.rank, event.fields["standby"]) for event in job.events("respawn") if event.edge == "end"]


@BOTH
def test_a_standby_takes_the_place_of_a_rank(tmp_path: Path, mode: dict[str, Any]) -> None:
    job = start(tmp_path, "1:4:0:gate", "1:5:0:SIGKILL", **mode)
    (standby,) = wait_for_standbys(job, 1)
    (job.run_dir / "gate").touch()
    ended = end(job)
    assert places(job) == [(1, True)]
    assert job.notes("go", 1)[-1]["pid"] == standby
    assert job.log(1).count("begins") == 2
    assert "incarnation 1 begins" in job.log(1)
    assert "a standby is lost" not in ended.err
