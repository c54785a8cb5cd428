"""Test the contract of a script (docs/contract.md): declared state and plain attributes are exact after faults."""

import re

import pytest

from checkpointless.observability.report.verify import compare
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Trainings, TrainingsOf

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(SCRIPTS / "contract_loop.py")
STEPS = 14
LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("average", "draws", "scaler")]
#: In steps of the second and the third epoch; the last finds a rank whose process is new.
FAULTS = (
    "exception@before_optimizer:rank=1,step=7",
    "sigkill@forward:rank=0,step=9",
    "sigkill@optimizer:rank=1,step=12",
)


@pytest.mark.parametrize("kind", ["clip", "workers", "optimizer", *LONG])
def test_a_loop_gets_back_what_it_declares(trainings: Trainings, kind: str) -> None:
    said = trainings.rough(2, (str(STEPS), kind), *FAULTS).told()
    assert f"norms of {STEPS} steps" in said, said
    assert "begin anew" not in said, said
    assert "what an undisturbed run computes" not in said, said


def test_a_loop_that_does_not_declare_is_warned_before_it_parts(attempt: Attempt, trainings: Trainings) -> None:
    args = (str(STEPS), "clip", "undeclared")
    job = attempt(2, args=args, faults=FAULTS[:1])
    assert "these variables of the loop change from step to step" in job.log(0), job.story()
    assert "average, generator, norms" not in job.log(0), "nothing draws from the generator"
    assert not compare(trainings.calm(2, *args).steps, job.steps).equal, "so this test can fail"


def test_an_optimizer_with_state_of_its_own_is_refused_where_it_is_not_registered(attempt: Attempt) -> None:
    job = attempt(2, args=(str(STEPS), "optimizer", "undeclared"), code=1)
    assert "Paced keeps 'pace' in its state_dict" in job.said[-1], job.story()
    assert "checkpointless.register_optimizer_state" in job.said[-1], job.story()


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        # Step 9 is the first of an epoch, whose persistent workers are started again.
        ("keeps-clip", ("exception@optimizer:rank=1,step=9", "sigkill@optimizer:rank=0,step=14")),
        pytest.param(
            "keeps-average",
            (
                "sigkill@forward:rank=0,step=4",
                "exception@after_optimizer:rank=1,step=12",  # before a validation
                "sigkill@between:rank=1,step=18",
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_plain_attributes_and_the_state_of_callbacks_are_each_ranks_own(
    trainings_of: TrainingsOf, kind: str, faults: tuple[str, ...]
) -> None:
    """Also a validation loader with persistent workers does not move the training's streams."""
    modules = trainings_of(str(SCRIPTS / "lightning_fit.py"))
    args = ("24", "ddp", kind, "validation")
    said, undisturbed = modules.rough(2, args, *faults).told(), modules.calm(2, *args).told()
    results = set(re.findall("RESULT .*", undisturbed))
    assert len(results) == 6, undisturbed
    assert set(re.findall("RESULT .*", said)) == results
    assert said.count("Mean.hidden") == 2, "what is left out is named once in each process of rank 0"
    assert "gets a peer's" not in said, said
