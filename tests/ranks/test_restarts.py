"""Test restarts of the whole job: what no rank holds any more is taken from the script's own checkpoint."""

from pathlib import Path

import pytest
import torch

from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.agent_job import Ended, Job

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 10
#: Rank 0 dies in step 6, whose update rank 1 cannot make alone, and rank 1 when it could fill rank 0.
BOTH = ("sigkill@before_optimizer:rank=0,step=6", "sigkill@recovery:rank=1,step=5")


def train(tmp_path: Path, name: str, *faults: str, max_restarts: int = 0) -> tuple[Ended, Path]:
    folder, run_dir = tmp_path / name, tmp_path / f"run-{name}"
    folder.mkdir()
    job = Job(run_dir, "restarts.py", str(folder), str(STEPS), nproc=2, faults=faults, max_restarts=max_restarts)
    return job.end(), folder


def test_a_job_that_lost_its_state_begins_again_with_what_the_script_loads(tmp_path: Path) -> None:
    calm, expected = train(tmp_path, "calm", max_restarts=3)
    assert calm.code == 0, calm.err
    rough, found = train(tmp_path, "rough", *BOTH, max_restarts=3)
    assert rough.code == 0, rough.err
    for name, value in torch.load(expected / "final.pt").items():
        assert torch.equal(torch.load(found / "final.pt")[name], value), name
    assert "restart 1 of 3: no living rank holds the shard of ranks 0, 1" in rough.err
    assert "restart 2 of 3" not in rough.err
    assert "the script itself brought step 3 back; step 5 had been committed" in rough.err
    assert "(job); 2 steps are made once more" in rough.err
    *_, last = summarize(read_events(tmp_path / "run-rough"))
    assert last.rung is Rung.JOB
    assert last.steps_lost == 2


def test_without_restarts_the_last_line_names_the_ways_out(tmp_path: Path) -> None:
    job, _ = train(tmp_path, "ended", *BOTH)
    assert job.code == 1
    *_, last = job.err.splitlines()
    for words in ("no living rank holds the shard of ranks 0, 1", "--max-restarts N", "replicas", "tiers="):
        assert words in last
    assert "allow_restart_from_scratch=True" in last
