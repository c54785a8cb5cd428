"""Test a loop of one's own that goes on from its own checkpoint: through faults, and through its job's restart."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointless.observability.telemetry.event_names import Rung
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

BEFORE, LAST = 4, 11
#: Rank 0 dies in step 6, whose update rank 1 cannot make alone, and rank 1 when it could fill rank 0.
BOTH = ("sigkill@before_optimizer:rank=0,step=6", "sigkill@recovery:rank=1,step=5")


def train(zygote: Zygote, folder: Path, *args: object, **settings: Any) -> Job:
    """Train with a checkpoint in ``folder``, and the run directory beside it."""
    folder.mkdir(exist_ok=True)
    run_dir, words = folder.with_name(f"run-{folder.name}"), (str(folder), *map(str, args))
    script = str(SCRIPTS / "plain_resumed.py")
    return run_job(zygote, run_dir, 2, script=script, args=words, **settings)


@pytest.fixture
def first(nemo_zygote: Zygote, tmp_path: Path) -> Path:
    """Return the folder with the checkpoint of a job that made the first steps."""
    train(nemo_zygote, tmp_path / "first", BEFORE, 2)
    return tmp_path / "first"


def test_memory_says_which_steps_were_made_and_not_the_newest_checkpoint(
    nemo_zygote: Zygote, tmp_path: Path, first: Path
) -> None:
    faults = (
        "exception@before_optimizer:rank=1,step=5",  # the first step of this job
        "sigkill@between:rank=0,step=7",
        "sigkill@optimizer:rank=1,step=10",
    )
    folders = [shutil.copytree(first, tmp_path / name) for name in ("calm", "rough")]
    calm, rough = (train(nemo_zygote, folder, LAST, 2, faults=each) for folder, each in zip(folders, ((), faults)))
    assert sorted({record.step for record in calm.steps[0]}) == list(range(BEFORE + 1, LAST + 1))
    rough.assert_same(calm.steps, LAST - BEFORE)


def test_ranks_that_begin_at_different_steps_are_refused(nemo_zygote: Zygote, first: Path) -> None:
    job = train(nemo_zygote, first.rename(first.with_name("uneven")), LAST, 2, "uneven", code=1)
    assert "some ranks begin behind step 4, others behind step 5" in job.said[-1]
    assert not job.incidents


def test_a_job_that_lost_its_state_begins_again_with_what_the_script_loads(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    args = (10, 3, "repeats")
    train(nemo_zygote, tmp_path / "calm", *args, max_restarts=3)
    rough = train(nemo_zygote, tmp_path / "rough", *args, faults=BOTH, max_restarts=3)
    expected, found = (torch.load(tmp_path / name / "checkpoint.pt")["parts"][0] for name in ("calm", "rough"))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    said = "\n".join(rough.said)
    assert "restart 1 of 3: no living rank holds the shard of ranks 0, 1" in said
    assert "restart 2 of 3" not in said
    assert "the script itself brought step 3 back; step 5 had been committed" in said
    assert "(job); 2 steps are made once more" in said
    assert (rough.incidents[-1].rung, rough.incidents[-1].steps_lost) == (Rung.JOB, 2)


def test_without_restarts_the_last_line_names_the_ways_out(nemo_zygote: Zygote, tmp_path: Path) -> None:
    job = train(nemo_zygote, tmp_path / "ended", 10, 3, "repeats", faults=BOTH, code=1)
    for words in ("no living rank holds the shard of ranks 0, 1", "--max-restarts N", "replicas", "tiers="):
        assert words in job.said[-1]
    assert "allow_restart_from_scratch=True" in job.said[-1]
