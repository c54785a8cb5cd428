"""Test what users do in loops of their own beside steps: it is exact, or it is refused in the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.report.verify import Steps, compare
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

STEPS = 16
#: Where all that a step changes is done again, or is a part of the update.
PHASES = ("data", "forward", "backward", "before_optimizer", "optimizer", "after_optimizer")


def _train(zygote: Zygote, run_dir: Path, habit: str, *faults: str) -> Job:
    script = str(SCRIPTS / "plain_habits.py")
    return run_job(zygote, run_dir, 2, script=script, args=(str(STEPS), habit), faults=faults)


@pytest.fixture(scope="module")
def calm(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Steps]:
    """Return a function for the steps of a habit without faults; it trains each only once."""

    @functools.cache
    def steps(habit: str) -> Steps:
        job = _train(nemo_zygote, tmp_path_factory.mktemp("calm") / "run", habit)
        assert job.code == 0, job.story()
        return job.steps

    return steps


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
@pytest.mark.parametrize("habit", ["averages", "modes", "extra-state", "validates"])
def test_it_is_as_without_the_fault(
    nemo_zygote: Zygote, calm: Callable[[str], Steps], tmp_path: Path, habit: str, kind: str
) -> None:
    """A validation behind an update draws from the streams, and a fault in a later step takes nothing back."""
    phases = PHASES[:4] if habit == "validates" else PHASES  # what follows an update is not done again
    faults = [f"{kind}@{phase}:rank={at % 2},step={2 * at + 2}" for at, phase in enumerate(phases)]
    job = _train(nemo_zygote, tmp_path / "rough", habit, *faults)
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1), job.story()
    verdict = compare(calm(habit), job.steps)
    assert verdict.equal, f"{verdict.sentence}\n{job.story()}"
    assert verdict.steps == STEPS
    said = "\n".join(job.log(rank) for rank in range(2))
    assert ("Do it at the beginning of a step" in said) == (habit == "validates"), said


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("noise", "an optimizer draws random numbers in its step"),
        ("counts", "Counting keeps state under 'all', which is no parameter of it"),
        ("saves", "Saving keeps 'steps' in its state_dict"),
        ("compresses", "the communication hook powerSGD_hook keeps a PowerSGDState from step to step"),
        ("late-buffer", "the first step has registered the buffer module.1.scale"),
    ],
)
def test_it_is_refused_in_the_first_step(nemo_zygote: Zygote, tmp_path: Path, habit: str, reason: str) -> None:
    job = _train(nemo_zygote, tmp_path / "run", habit)
    assert job.code == 1, job.story()
    assert reason in "\n".join([*job.said, *(job.log(rank) for rank in range(2))]), job.story()
    assert not list((job.run_dir / "steps").glob("*.jsonl")), "nothing was trained"
