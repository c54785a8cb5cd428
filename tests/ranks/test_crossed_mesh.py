"""Test a loop whose tensors are replicated along different dimensions of a mesh, so that no two ranks are alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, Trainings, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 8
SCRIPT = str(SCRIPTS / "crossed_mesh.py")
Train = Callable[..., Job]


def run(zygote: Zygote, run_dir: Path, *faults: str, args: tuple[str, ...] = (str(STEPS),)) -> Job:
    return run_job(zygote, run_dir, 4, script=SCRIPT, args=args, faults=faults)


def ends(job: Job) -> list[str]:
    """Return what each rank says of its end: plain numbers of its optimizer, and its own buffer."""
    return [re.findall(r"norms .*", job.log(rank))[-1] for rank in range(4)]


@pytest.fixture(scope="module")
def train(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Train:
    trainings = Trainings(nemo_zygote, tmp_path_factory, SCRIPT)
    undisturbed = trainings.calm(4, str(STEPS))
    assert "a rank that dies cannot be restored" not in undisturbed.log(0)
    assert len(set(ends(undisturbed))) == 4, "each rank has numbers of its own"

    def compared(*faults: str, extra: tuple[str, ...] = ()) -> Job:
        job = trainings.rough(4, (str(STEPS),), *faults, steps=STEPS, more=extra)
        assert ends(job) == ends(undisturbed)
        return job

    return compared


def test_two_deaths_that_leave_every_part_a_holder(train: Train) -> None:
    """Ranks 0 and 3 have nothing in common but the bias."""
    job = train("sigkill@before_optimizer:rank=0,step=3", "sigkill@recovery:rank=3,step=2")
    assert job.incidents[-1].sources == (1, 2)


@pytest.mark.long  # test_plain_fsdp2.py has every phase
def test_parts_of_different_holders_are_not_compared(train: Train) -> None:
    job = train("exception@forward:rank=2,step=3", "sigkill@optimizer:rank=1,step=6", extra=("checksum",))
    assert len(job.incidents[1].sources) == 3, "of the bias all other ranks are holders"


def test_each_part_is_compared_among_its_holders(nemo_zygote: Zygote, tmp_path: Path) -> None:
    """A flipped bit is found, but not which holder is right."""
    faults = (
        "bitflip@between:rank=1,step=5",  # in the first steps, the loop is taken to have changed it
        "exception@backward:rank=2,step=6",
    )  # all have met in the forward pass
    job = run(nemo_zygote, tmp_path / "run", *faults, args=(str(STEPS), "checksum"))
    assert job.code == 1
    assert re.search(r"the replicas of the shard of ranks 0, 1 \(model\.0\.up\) differ at step 5", job.said[-1])


def test_only_what_has_no_second_holder_is_warned_of_by_name(nemo_zygote: Zygote, tmp_path: Path) -> None:
    job = run(nemo_zygote, tmp_path / "run", args=("2", "alone"))
    assert job.code == 0, job.story()
    assert "no two ranks hold the same model.0.up (others have more holders): a rank that dies cannot" in job.log(0)


def test_the_last_holder_of_a_part_is_lost(nemo_zygote: Zygote, tmp_path: Path) -> None:
    faults = ("sigkill@before_optimizer:rank=0,step=3", "sigkill@recovery:rank=2,step=2")
    job = run(nemo_zygote, tmp_path / "run", *faults)
    assert job.code == 1
    assert (
        "no living rank holds the shard of ranks 0, 2 (model.0.down); the last committed step was 2" in job.said[-1]
    )


def test_a_parameter_that_is_a_ranks_own_and_that_no_mesh_tells_is_refused(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    job = run(nemo_zygote, tmp_path / "run", args=("3", "own"))
    assert job.code == 1
    assert "ranks 0, 1, 2, 3 are to hold the same model.0.bias, and it begins with other values" in job.said[-1]
    with pytest.raises(FileNotFoundError, match="has no recorded steps"):
        _ = job.steps
