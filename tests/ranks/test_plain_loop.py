"""Test a loop without Lightning or NeMo, with a plain torch optimizer, through faults around its commit."""

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Trainings
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 7
SCRIPT, FROZEN = str(SCRIPTS / "plain_adamw.py"), str(SCRIPTS / "plain_frozen.py")


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


@pytest.mark.parametrize("kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"])
def test_parameters_that_the_loop_frees_and_freezes(
    nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """It does so once, in steps 4 and 7: what is trained afterwards belongs to the state."""
    places = ("before_optimizer:rank=1,step=4", "between:rank=0,step=7", "optimizer:rank=2,step=9")
    trainings = Trainings(nemo_zygote, tmp_path_factory, FROZEN)
    trainings.rough(3, ("10", "frees"), *(f"{kind}@{place}" for place in places), steps=10)


@pytest.mark.parametrize(
    ("what", "faults", "reason", "made"),
    [
        ("adds", (), "an optimizer has other parameters than at the beginning (add_param_group)", 3),
        ("adds", ("exception@before_optimizer:rank=1,step=4",), "an optimizer has other parameters than at the", 3),
        ("late", (), "requires_grad of parameters was changed between update() of step 4 and the next step", 4),
    ],
    ids=["adds", "adds-and-fails-at-once", "late"],
)
def test_what_the_loop_changes_in_a_way_that_no_recovery_repeats_is_noticed_at_once(
    attempt: Attempt, what: str, faults: tuple[str, ...], reason: str, made: int
) -> None:
    job = attempt(3, script=FROZEN, args=("10", what), faults=faults, code=1)
    said = job.told()
    assert reason in said, job.story()
    # Of the last step, the rank that fails has its record; the others may be ended before they have theirs.
    assert {record.step for records in job.steps.values() for record in records} == set(range(1, made + 1))
