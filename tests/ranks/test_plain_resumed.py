"""Test a loop of one's own that goes on from a checkpoint of its own, through faults."""

import shutil
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

BEFORE, LAST = 4, 11


def train(
    zygote: Zygote, run_dir: Path, folder: Path, *more: str, last: int = LAST, faults: tuple[str, ...]
) -> Job:
    args = (str(folder), str(last), *more)
    return run_job(zygote, run_dir, 2, script=str(SCRIPTS / "plain_resumed.py"), args=args, faults=faults)


@pytest.fixture
def first(nemo_zygote: Zygote, tmp_path: Path) -> Path:
    """Return the folder with the checkpoint of a job that made the first steps."""
    folder = tmp_path / "first"
    folder.mkdir()
    job = train(nemo_zygote, tmp_path / "run-first", folder, last=BEFORE, faults=())
    assert job.code == 0, job.story()
    return folder


def test_memory_says_which_steps_were_made_and_not_the_newest_checkpoint(
    nemo_zygote: Zygote, tmp_path: Path, first: Path
) -> None:
    jobs = []
    faults = (
        "exception@before_optimizer:rank=1,step=5",  # the first step of this job
        "sigkill@between:rank=0,step=7",
        "sigkill@optimizer:rank=1,step=10",
    )
    for name, wanted in (("calm", ()), ("rough", faults)):
        folder = shutil.copytree(first, tmp_path / name)
        job = train(nemo_zygote, tmp_path / f"run-{name}", folder, faults=wanted)
        assert job.code == 0, job.story()
        jobs.append(job)
    calm, rough = jobs
    assert fired(rough.run_dir) == dict.fromkeys(faults, 1)
    assert sorted({record.step for record in calm.steps[0]}) == list(range(BEFORE + 1, LAST + 1))
    rough.assert_same(calm.steps, LAST - BEFORE)


def test_ranks_that_begin_at_different_steps_are_refused(nemo_zygote: Zygote, tmp_path: Path, first: Path) -> None:
    job = train(nemo_zygote, tmp_path / "run", first, "uneven", faults=())
    assert job.code == 1
    assert "some ranks begin behind step 4, others behind step 5" in job.said[-1]
    assert not job.incidents
