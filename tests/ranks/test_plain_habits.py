"""Test what users do in loops of their own beside steps: it is exact, or it is refused in the first steps."""

from collections.abc import Sequence

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Trainings

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 16
SCRIPT = str(SCRIPTS / "plain_habits.py")
#: Where all that a step changes is done again, or is a part of the update.
PHASES = ("data", "forward", "backward", "before_optimizer", "optimizer", "after_optimizer")


def by_turns(phases: Sequence[str], first: int) -> list[str]:
    """Return a fault for each phase, in every second step, of each kind and on each rank in turn."""
    return [
        f"{('exception', 'sigkill')[at % 2]}@{phase}:rank={at // 2 % 2},step={2 * at + first}"
        for at, phase in enumerate(phases)
    ]


@pytest.mark.parametrize(
    "habit",
    [
        "extra-state",
        "validates",
        pytest.param("exchanges", marks=pytest.mark.long),
        pytest.param("exchanges-slowly", marks=pytest.mark.long),
        pytest.param("plateaus", marks=pytest.mark.long),
        pytest.param("grows", marks=pytest.mark.long),
        pytest.param("doubles", marks=pytest.mark.long),
        "hooks-all",
    ],
)
def test_it_is_as_without_the_fault(trainings: Trainings, habit: str) -> None:
    """A validation behind an update draws from the streams, and a fault in a later step takes nothing back."""
    phases = PHASES[:4] if habit == "validates" else PHASES  # what follows an update is not done again
    job = trainings.rough(2, (str(STEPS), habit), *by_turns(phases, 2), steps=STEPS)
    said = "\n".join(job.log(rank) for rank in range(2))
    assert ("Do it at the beginning of a step" in said) == (habit == "validates"), said
    assert "what an undisturbed run computes" not in said, said
    assert "parameters were written to" not in said, said
    assert "begin anew after a fault" not in said, said


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("noise", "an optimizer draws random numbers in its step"),
        ("counts", "Counting keeps state under 'all', which is no parameter of it"),
        ("saves", "Saving keeps 'steps' in its state_dict"),
        (
            "local",
            "ranks 0, 1 are to hold the same optimizer.0.0.0.parameter, and after step 1 it has other values",
        ),
        ("two-trainings", "a second training begins in the block"),
        ("two-updates", "update() was called twice in step 1"),
        ("compresses", "the communication hook powerSGD_hook keeps a PowerSGDState from step to step"),
        ("schedules", "a learning-rate scheduler of SGD is not known here"),
        ("late-plateau", "the step() of a ReduceLROnPlateau was called between update() of step 1 and the next"),
        ("late-buffer", "the first step has registered the buffer module.1.scale"),
        ("follows", "the parameter 0.weight is changed in a step before its update()"),
        ("bounds", "the parameter module.1.rows.weight is changed in a step before its update()"),
        ("clamps", "the parameter module.0.weight is changed between update() and the next step"),
        ("decays", "weight_decay of param groups was changed between update() of step 1 and the next step"),
        ("forgets", "momentum_buffer of the parameter module.0.weight is changed between update() and the next"),
        ("resets", "the parameter module.0.weight is changed between two calls of steps()"),
    ],
)
def test_it_is_refused_in_the_first_steps(attempt: Attempt, habit: str, reason: str) -> None:
    job = attempt(2, args=(str(STEPS), habit), code=1)
    assert reason in job.told(), job.story()
    recorded = [path.read_text().splitlines() for path in (job.run_dir / "steps").glob("rank-*.jsonl")]
    counts = dict.fromkeys(("local", "late-plateau", "two-updates", "bounds"), 1)
    counts |= dict.fromkeys(("clamps", "decays", "forgets", "follows"), 1)
    counts["resets"] = 3
    most = counts.get(habit, 0)
    assert all(len(lines) <= most for lines in recorded), "nothing was trained behind that"


@pytest.mark.parametrize(
    "habit",
    ["epochs", *(pytest.param(habit, marks=pytest.mark.long) for habit in ("epochs-change", "warms-up")), "stops"],
)
def test_how_a_loop_goes_through_its_steps(trainings: Trainings, habit: str) -> None:
    """Several calls of ``steps()``, a backward pass before the first, and the step that one rank makes the last.

    Between calls something may draw, and move buffers: a function that is entered again goes through that again.
    """
    faults = [*by_turns(PHASES, 4), "exception@after_optimizer:rank=1,step=9"]
    trainings.rough(2, (str(STEPS), habit), *faults, steps=STEPS - 2 if habit == "stops" else STEPS)


def test_a_loop_that_is_left_by_break_is_warned_of_once(trainings: Trainings) -> None:
    job = trainings.calm(2, str(STEPS), "breaks")
    assert job.log(0).count("steps() was left by break or return") == 1, job.story()
    assert "steps() was left" not in job.log(1), job.story()


@pytest.mark.parametrize("phase", ["backward", "before_optimizer"])
def test_a_loader_that_begins_anew_after_a_fault_is_noticed(attempt: Attempt, phase: str) -> None:
    fault = f"exception@{phase}:rank=1,step=5"
    job = attempt(2, args=(str(STEPS), "goes-through"), faults=(fault,))
    # A rank that had not used its batch yet has nothing to compare: only the gradients wait for every rank.
    has_used = [1] if phase == "backward" else [0, 1]
    said = "step 5 takes another batch than before the fault"
    assert all(said in job.log(rank) for rank in has_used), job.story()
    assert "resumed, not exact" in job.story(), job.story()


def test_an_average_that_is_not_declared_is_warned_of(attempt: Attempt) -> None:
    job = attempt(2, args=(str(STEPS), "averages-beside"))
    assert "change from step to step and begin anew after a fault: beside" in job.log(0), job.story()


@pytest.mark.parametrize("kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"])
def test_parameters_that_the_loop_frees_and_freezes(trainings: Trainings, kind: str) -> None:
    """It does so once, in steps 4 and 7: what is trained afterwards belongs to the state."""
    places = ("before_optimizer:rank=1,step=4", "between:rank=0,step=7", "optimizer:rank=2,step=9")
    trainings.rough(3, ("10", "frees"), *(f"{kind}@{place}" for place in places), steps=10)


@pytest.mark.parametrize(
    ("what", "faults", "reason", "made"),
    [
        ("adds", (), "an optimizer has other parameters than at the beginning (add_param_group)", 3),
        ("adds", ("exception@before_optimizer:rank=1,step=4",), "an optimizer has other parameters than at the", 3),
        (
            "frees-late",
            (),
            "requires_grad of parameters was changed between update() of step 4 and the next step",
            4,
        ),
    ],
    ids=["adds", "adds-and-fails-at-once", "frees-late"],
)
def test_what_the_loop_changes_in_a_way_that_no_recovery_repeats_is_noticed_at_once(
    attempt: Attempt, what: str, faults: tuple[str, ...], reason: str, made: int
) -> None:
    job = attempt(3, args=("10", what), faults=faults, code=1)
    assert reason in job.told(), job.story()
    # Of the last step, the rank that fails has its record; the others may be ended before they have theirs.
    assert {record.step for records in job.steps.values() for record in records} == set(range(1, made + 1))
