"""Test trainings of Megatron-Bridge through faults in every phase, equal to the bit to those without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.jobs import Attempt, Job, Trainings, faults_in

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")
Train = Callable[..., Job]


@pytest.fixture(scope="module")
def train(trainings: Trainings) -> Train:
    def compared(steps: int, layout: str, *faults: str, breaks: str = "") -> Job:
        args = (str(steps), *layout.split())
        job = trainings.rough(4, args, *faults, steps=steps, more=(f"break={breaks}",) if breaks else ())
        assert logged(job) == logged(trainings.calm(4, *args))
        return job

    return compared


def logged(job: Job) -> dict[str, str]:
    """Return what Bridge has logged of each iteration and validation, the last time it did."""
    log = job.log(3)
    steps = re.findall(r"iteration +(\d+)/ +\d+ .*?(learning rate: .*)\n", log)
    validations = re.findall(r"validation loss at (iteration \d+[\w ]*) \| (.*)\n", log)
    assert steps
    return dict(steps + validations)


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
@pytest.mark.parametrize("layout", [pytest.param("", marks=pytest.mark.long), "tp=2"], ids=["dp4", "tp2-dp2"])
def test_every_phase(train: Train, layout: str, kind: str) -> None:
    train(2 * len(PHASES) + 1, f"{layout} evaluate=3", *faults_in(PHASES, kind, 4))


@pytest.mark.parametrize(
    ("layout", "kill"),
    [
        ("bf16=1 overlap=1", "sigkill@forward:rank=1,step=2"),
        pytest.param("fp16=1 log=3", "sigkill@before_optimizer:rank=1,step=3", marks=pytest.mark.long),
        pytest.param("pp=2", "sigkill@backward:rank=0,step=3", marks=pytest.mark.long),
        pytest.param("instances=1", "sigkill@forward:rank=1,step=2", marks=pytest.mark.long),
        pytest.param("tp=2 bf16=1 overlap=1 batch=16", "sigkill@between:rank=3,step=2", marks=pytest.mark.long),
    ],
    ids=["bf16-overlap", "fp16-skipped-steps", "pp2", "copies-at-a-neighbor", "tp2-accumulation"],
)
def test_precisions_and_layouts(train: Train, layout: str, kill: str) -> None:
    train(8, f"{layout} evaluate=3", kill, "exception@optimizer:rank=0,step=5", "exception@between:rank=2,step=6")


@pytest.mark.parametrize("data", [pytest.param("single", marks=pytest.mark.long), "cyclic"])
def test_the_position_in_the_data_in_validations_and_declared_state(train: Train, data: str) -> None:
    """There are five batches in a pass: the faults come in the second, at its ends, and in the third.

    Before them a rank dies in a validation, and two workers do. What a callback and the forward step count is as
    without faults, and the loss depends on it.
    """
    faults = (
        "exception@between:rank=0,step=5",
        "sigkill@after_optimizer:rank=1,step=6",
        "exception@backward:rank=2,step=8",
        "dataloader@data:rank=2,step=9",
        "sigkill@data:rank=3,step=11",
        "exception@after_optimizer:rank=1,step=12",
        "dataloader@data:rank=0,step=14,how=kill",
    )
    job = train(15, f"state=1 data={data} workers=1 evaluate=2 log=3", *faults, breaks="eval:sigkill:1:4")
    for rank in range(4):
        said = re.findall(r"events: (.*)", job.log(rank))[-1]
        assert said.count("start") == said.count("end") == 15, said


@pytest.mark.long
@pytest.mark.parametrize("breaks", ["eval:exception:2:4", "end:exception:2:4", "test:exception:3:6"])
def test_in_a_validation(train: Train, breaks: str) -> None:
    train(6, "data=cyclic evaluate=2 log=4", breaks=breaks)


def test_in_a_recovery_and_twice_in_one_step(train: Train) -> None:
    """What is added up to log is kept, although Bridge has not logged between the faults."""
    faults = []
    for step, phase in ((3, "init"), (5, "recovery"), (7, "transfer")):
        faults += [f"sigkill@forward:rank=1,step={step}", f"exception@{phase}:rank=3,step={step - 1}"]
    job = train(9, "evaluate=3 log=4", *faults, "exception@forward:rank=1,step=8,times=2")
    assert len(job.incidents) == 8


def test_what_cannot_be_carried_through_a_fault_ends_the_job_at_once(attempt: Attempt) -> None:
    job = attempt(2, args=("3", "data=external"), code=1)
    assert "dataset.dataloader_type: checkpointless does not know the position" in "\n".join(job.said)
    assert not (job.run_dir / "steps").exists()
