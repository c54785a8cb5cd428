"""Test a loop without Lightning or NeMo, with a plain torch optimizer, through faults around its commit."""

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Trainings

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 7
SCRIPT = str(SCRIPTS / "plain_adamw.py")


@pytest.mark.parametrize("phases", [("before_optimizer", "after_optimizer"), ("optimizer", "between")])
def test_a_plain_adamw_is_protected(trainings: Trainings, phases: tuple[str, str]) -> None:
    first, second = phases
    faults = (
        f"exception@{first}:rank=1,step=1",
        f"exception@{second}:rank=1,step=3",
        f"sigkill@{first}:rank=0,step=4",
        f"sigkill@{second}:rank=0,step=6",
    )
    trainings.rough(3, (str(STEPS),), *faults, steps=STEPS)


@pytest.mark.long
def test_a_filled_rank_has_used_its_groups_more_often_than_others(trainings: Trainings) -> None:
    """With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch compares that before each collective."""
    trainings.rough(3, (str(STEPS),), "sigkill@before_optimizer:rank=2,step=4", more=("detail",))


@pytest.mark.long
def test_ranks_that_hold_different_parts_of_the_model_are_filled_from_their_own_replicas(
    attempt: Attempt, trainings: Trainings
) -> None:
    """The model is tensor parallel over ranks 0 and 1, and over 2 and 3: rank 0 holds what rank 2 does."""
    args = (str(STEPS), "2")
    faults = ("sigkill@optimizer:rank=0,step=2", "sigkill@between:rank=3,step=5")
    disturbed = trainings.rough(4, args, *faults, steps=STEPS)
    assert [incident.sources for incident in disturbed.incidents] == [(2,), (1,)]

    both = ("sigkill@before_optimizer:rank=1,step=3", "sigkill@recovery:rank=3,step=2")
    disturbed = attempt(4, args=args, faults=both, code=1)
    assert "no living rank holds the shard of ranks 1, 3" in disturbed.said[-1]


def test_nobody_left_ends_the_job_with_the_reason(attempt: Attempt) -> None:
    faults = (
        "sigkill@before_optimizer:rank=0,step=3",
        *(f"sigkill@recovery:rank={rank},step=2" for rank in (1, 2)),
    )
    job = attempt(3, args=(str(STEPS),), faults=faults, code=1)
    assert "no living rank holds the shard of ranks 0, 1, 2" in job.said[-1]
