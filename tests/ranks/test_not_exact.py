"""Test that a step that is another one when it is made again is an outcome, and ends a strict job."""

from typing import Any

import pytest

from checkpointless.observability.report.incidents import Outcome
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Job

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]

SAYS = {"batch": "step 4 takes another batch than before the fault", "loss": "step 4 has the loss "}


def _train(attempt: Attempt, trainer: str, what: str, **more: Any) -> Job:
    phase = "before_optimizer" if what == "loss" else "backward"  # rank 1 has a batch; rank 0 gets to its loss
    faults = (f"exception@{phase}:rank=1,step=4",)
    name, args = {"plain": ("plain_habits", ("6",)), "lightning": ("lightning_fit", ("6", "ddp"))}[trainer]
    args, script = (*args, f"other-{what}"), str(SCRIPTS / f"{name}.py")  # nothing has other-nothing
    return attempt(2, script=script, args=args, faults=faults, **more)


@pytest.mark.parametrize(
    ("trainer", "what"),
    [
        ("plain", "loss"),
        ("lightning", "batch"),
        pytest.param("plain", "batch", marks=pytest.mark.long),
        pytest.param("lightning", "loss", marks=pytest.mark.long),
    ],
)
def test_an_inexact_incident_is_an_outcome(attempt: Attempt, trainer: str, what: str) -> None:
    job = _train(attempt, trainer, what)
    (line,) = (line for line in job.said if line.startswith("incident 1: re"))
    assert line.startswith("incident 1: resumed, not exact, in "), job.story()
    assert SAYS[what] in line
    assert "nothing was lost" not in line
    (incident,) = job.incidents
    assert incident.outcome is Outcome.INEXACT
    assert SAYS[what] in incident.inexact
    assert any(SAYS[what] in job.log(rank) for rank in (0, 1))  # rank 0 may have been stopped before its loss


@pytest.mark.parametrize("trainer", ["plain", pytest.param("lightning", marks=pytest.mark.long)])
def test_a_strict_job_ends_with_why(attempt: Attempt, trainer: str) -> None:
    job = _train(attempt, trainer, "batch", strict=True, code=1)
    assert job.said[-1].endswith(f"{SAYS['batch']}: the job ends, as --strict (CHECKPOINTLESS_STRICT) asks for")
    assert not any("recovered" in line for line in job.said), job.story()


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["plain", "lightning"])
def test_a_strict_job_that_is_exact_says_nothing(attempt: Attempt, trainer: str) -> None:
    job = _train(attempt, trainer, "nothing", strict=True)
    assert any(line.endswith("nothing was lost") for line in job.said), job.story()
    assert not job.events("inexact")
