"""Test ranks whose processes the kernel refuses, under a real agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointless.agent.ranks import retried_starts
from tests.ranks.agent_job import Job

pytestmark = pytest.mark.ranks

REFUSES: dict[str, Any] = {"preload": ("refuses_forks",)}
NO = "Resource temporarily unavailable"


def refusals(job: Job) -> list[tuple[int, int, bool]]:
    """Return of which ranks and incarnations this was told, and whether it was given up."""
    found = [(e.rank, e.fields["incarnation"], e.fields["is_final"]) for e in job.events("refused")]
    return sorted(found)


@pytest.mark.parametrize("refused", ["4", "4-9"])
def test_a_fork_that_is_refused_for_a_moment_is_made(tmp_path: Path, refused: str) -> None:
    """Two ranks have died; neither process of theirs keeps a descriptor of the other that waits."""
    faults = ("1:4:0:SIGKILL", "2:4:0:SIGKILL", "1:7:1:SIGKILL")
    job = Job(tmp_path, "steps.py", *faults, env={"REFUSED_FORKS": refused}, **REFUSES)
    ended = job.end()
    assert ended.code == 0, ended.err
    told = refusals(job)
    assert told
    assert {(incarnation, is_final) for _, incarnation, is_final in told} == {(1, False)}
    assert f"rank {told[0][0]} could not be started: {NO}; it is tried again for 30 s" in ended.err
    assert [n["step"] for n in job.notes("step", 0)] == list(range(1, 11))
    assert len(job.events("recovered")) == 2


def test_a_first_fork_that_is_refused_for_a_moment_is_made(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", env={"REFUSED_FORKS": "2-3"}, **REFUSES)
    ended = job.end()
    assert ended.code == 0, ended.err
    assert {(incarnation, is_final) for _, incarnation, is_final in refusals(job)} == {(0, False)}


@pytest.mark.long  # it waits for half a minute; the units have a clock of their own
def test_forks_that_stay_refused_end_the_start_in_a_line_and_the_job_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", env={"REFUSED_FORKS": "3-999999"}, **REFUSES)
    ended = job.end()
    assert ended.code == 1
    (line,) = ended.err.splitlines()[-1:]
    assert line == f"rank 2 could not be started: {NO}, for 30 s; " + retried_starts._LIMITS
    assert "hung up" not in ended.err
