"""Test ranks whose processes the kernel refuses, under a real agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.agent_job import Job

pytestmark = pytest.mark.ranks

REFUSES: dict[str, Any] = {"preload": ("refuses_forks",)}
NO = "Resource temporarily unavailable"


@pytest.mark.parametrize("refused", ["4", "4-6"])
def test_a_successor_whose_fork_is_refused_is_started_again(tmp_path: Path, refused: str) -> None:
    """Two ranks have died; neither process of theirs keeps a descriptor of the other."""
    faults = ("1:4:0:SIGKILL", "2:4:0:SIGKILL", "1:7:1:SIGKILL")
    job = Job(tmp_path, "steps.py", *faults, env={"REFUSED_FORKS": refused}, **REFUSES)
    ended = job.end()
    assert ended.code == 0, ended.err
    assert [n["step"] for n in job.notes("step", 0)] == list(range(1, 11))
    assert len(job.events("recovered")) == 2


def test_a_first_fork_that_is_refused_ends_the_job_in_a_line(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", env={"REFUSED_FORKS": "3-999999"}, **REFUSES)
    ended = job.end()
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("rank 2 exited with code 71; its log: ")
    assert f"the kernel gives this rank no process ({NO}): raise the limits" in job.log(2)
    assert "hung up" not in ended.err
