"""Test trainings with Megatron-LM's ``pretrain`` through faults, equal to the bit to those without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.jobs import Attempt, Job, Trainings, faults_in

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "megatron_lm.py")
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
Train = Callable[..., Job]


@pytest.fixture(scope="module")
def train(trainings: Trainings) -> Train:
    def compared(steps: int, options: str, *faults: str, breaks: str = "", made: int | None = None) -> Job:
        args = ("--train-iters", str(steps), *options.split())
        more = (f"--break={breaks}",) if breaks else ()
        job = trainings.rough(4, args, *faults, steps=steps if made is None else made, more=more)
        assert len(job.incidents) >= bool(breaks)
        assert "waited for each other" not in "\n".join(job.said), "ranks began differently"
        assert logged(job) == logged(trainings.calm(4, *args))
        return job

    return compared


def logged(job: Job) -> dict[str, str]:
    """Return what Megatron has logged of each iteration and validation, the last time it did."""
    log = job.log(3)
    steps = re.findall(r"iteration +(\d+)/ +\d+ \| (consumed samples: +\d+) .*?(learning rate: .*)\n", log)
    validations = re.findall(r"validation loss at (iteration \d+[\w ]*) \| (.*)\n", log)
    assert steps
    return {number: f"{samples} {rest}" for number, samples, rest in steps} | dict(validations)


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
@pytest.mark.parametrize(
    "layout", [pytest.param("", marks=pytest.mark.long), "--tensor-model-parallel-size 2"], ids=["dp4", "tp2-dp2"]
)
def test_every_phase(train: Train, layout: str, kind: str) -> None:
    train(2 * len(PHASES) + 1, f"--eval-interval 3 {layout}", *faults_in(PHASES, kind, 4))


@pytest.mark.parametrize(
    "options",
    [
        "--pipeline-model-parallel-size 2 --bf16",
        pytest.param(f"--bf16 {OVERLAP} --global-batch-size 16", marks=pytest.mark.long),
    ],
    ids=["pp2", "overlap-accumulation"],
)
def test_layouts(train: Train, options: str) -> None:
    faults = (
        "sigkill@backward:rank=1,step=2",
        "exception@optimizer:rank=0,step=4",
        "exception@between:rank=2,step=5",
    )
    train(7, f"--eval-interval 3 {options}", *faults)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_the_second_pass_over_the_data(train: Train, workers: int) -> None:
    """There are five batches in a pass: the faults come in the second, at its ends, and in the third."""
    faults = (
        "exception@between:rank=0,step=5",
        "sigkill@after_optimizer:rank=1,step=6",
        "exception@backward:rank=2,step=8",
        "sigkill@data:rank=3,step=11",
    )
    options = f"--few --dataloader-type cyclic --num-workers {workers} --log-interval 3 --eval-interval 4"
    train(13, f"{options}", *faults)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("evaluate", "sigkill"),
        ("save_checkpoint", "exception"),
        pytest.param("evaluate", "exception", marks=pytest.mark.long),
        pytest.param("save_checkpoint", "sigkill", marks=pytest.mark.long),
    ],
)
def test_in_a_validation_and_in_a_save(train: Train, where: str, kind: str) -> None:
    options = "--eval-interval 2 --save RUN_DIR/saved --save-interval 2"
    train(6, options, breaks=f"{where}:{kind}:1:2")


def test_a_checkpoint_that_was_loaded(attempt: Attempt, train: Train, tmp_path: Path) -> None:
    """After a fault, memory has more than the checkpoint with which the job began."""
    common = f"--load {tmp_path / 'saved'}"
    saving = f"--train-iters 7 --save {tmp_path / 'saved'} --save-interval 100 --exit-interval 3 {common}"
    attempt(4, args=tuple(saving.split()))
    train(7, common, "sigkill@forward:rank=1,step=5", "exception@between:rank=2,step=6", made=4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            "--async-save --use-persistent-ckpt-worker",
            "async_save: checkpointless does not go on with background saves: set it to False",
        ),
        ("--full-validation", "full_validation: checkpointless does not know the pass of a whole validation"),
    ],
)
def test_what_cannot_be_carried_through_ends_the_job(attempt: Attempt, options: str, reason: str) -> None:
    job = attempt(2, args=("--train-iters", "3", *options.split()), code=1)
    assert reason in "\n".join(job.said)
