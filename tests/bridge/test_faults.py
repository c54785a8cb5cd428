"""Test trainings of Megatron-Bridge through faults in every phase, equal to the bit to those without."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.report.verify import compare
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
PHASES = (
    *("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between"),
    *("init", "recovery", "transfer"),
)
Train = Callable[..., Job]


@pytest.fixture(scope="module")
def train(bridge_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains with faults and compares; the undisturbed job is made once for each kind."""
    undisturbed: dict[tuple[str, ...], Job] = {}

    def run(args: tuple[str, ...], *faults: str) -> Job:
        folder = tmp_path_factory.mktemp("bridge")
        job = run_job(bridge_zygote, folder / "run", 4, script=SCRIPT, args=args, faults=faults)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == dict.fromkeys(faults, 1)
        return job

    def compared(steps: int, layout: str, *faults: str, breaks: str = "") -> Job:
        args = (str(steps), *layout.split())
        if args not in undisturbed:
            undisturbed[args] = run(args)
        job = run((*args, f"break={breaks}") if breaks else args, *faults)
        verdict = compare(undisturbed[args].steps, job.steps)
        assert verdict.equal, f"{verdict.sentence}\n{job.story()}"
        assert verdict.steps == steps
        assert logged(job) == logged(undisturbed[args])
        return job

    return compared


def logged(job: Job) -> dict[str, str]:
    """Return what Bridge has logged of each iteration and validation, the last time it did."""
    log = job.log(3)
    steps = re.findall(r"iteration +(\d+)/ +\d+ .*?(learning rate: .*)\n", log)
    validations = re.findall(r"validation loss at (iteration \d+[\w ]*) \| (.*)\n", log)
    assert steps
    return dict(steps + validations)


def faults_in(phases: tuple[str, ...], kind: str) -> list[str]:
    """Return a fault for each phase, every second step, on one rank after the other."""
    return [f"{kind}@{phase}:rank={place % 4},step={2 * place}" for place, phase in enumerate(phases, start=1)]


def test_an_exception(train: Train) -> None:
    train(5, "", "exception@backward:rank=1,step=3")


@pytest.mark.parametrize(
    "kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"], ids=["exception", "sigkill"]
)
@pytest.mark.parametrize("layout", ["", "tp=2"], ids=["dp4", "tp2-dp2"])
def test_every_phase(train: Train, layout: str, kind: str) -> None:
    phases = PHASES[:8]
    train(2 * len(phases) + 1, f"{layout} evaluate=3", *faults_in(phases, kind))
