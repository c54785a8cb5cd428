"""Test that gradients that a device computes wrongly are found before the update, and the step is redone."""

import pytest

from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Job, Trainings, TrainingsOf, small
from tests.ranks.layouts import DROPOUT, PP2

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 20  # more than there are parameters: the gradient of another one is damaged in each
SCRIPT = str(SCRIPTS / "plain_checked.py")
CALM = (str(STEPS), "1000")  # checks nothing but its first step


def _found(job: Job) -> list[tuple[int | None, int | None, bool]]:
    found = build_report(str(job.run_dir), read_events(job.run_dir)).corrupted
    return [(each["rank"], each["step"], each["redone"]) for each in found]


def _require_unseen(job: Job, calm: Job, steps: int) -> None:
    """Require that checks have changed nothing and found nothing."""
    assert (job.incidents, _found(job)) == ([], [])
    job.assert_same(calm.steps, steps)


def test_a_flip_in_the_gradient_or_the_output_of_each_layer_is_found_and_healed(trainings: Trainings) -> None:
    places = [("gradient", "activation")[step // 2 % 2] for step in range(STEPS + 1)]
    faults = [f"bitflip@{places[step]}:rank={step % 3},step={step}" for step in range(1, STEPS + 1, 2)]
    job = trainings.run(3, (str(STEPS), "1"), *faults)
    assert _found(job) == [(step % 3, step, True) for step in range(1, STEPS + 1, 2)]
    assert "rank 1 raised CorruptedGradientError at step 1: the gradient of" in "\n".join(job.said)
    assert all(incident.steps_lost == 0 for incident in job.incidents)
    job.assert_same(trainings.calm(3, *CALM).steps, STEPS)


def test_a_rank_that_was_wrong_twice_goes_on_on_a_spare(trainings: Trainings) -> None:
    faults = ("bitflip@gradient:rank=1,step=2", "bitflip@activation:rank=1,step=4")
    args = ("8", "1", "waits")
    job = trainings.run(1, args, *faults, nnodes=2, spares=1)
    assert [each.how for each in job.incidents] == ["exception", "exception", "planned"]
    assert any("node 1 moves to a spare (rank 1 has computed gradients wrongly twice)" in line for line in job.said)
    job.assert_same(trainings.calm(2, "8", "1000").steps, 8)


def test_checks_change_nothing_and_find_nothing_and_what_is_not_checked_is_not_seen(trainings: Trainings) -> None:
    _require_unseen(trainings.run(3, (str(STEPS), "1")), trainings.calm(3, *CALM), STEPS)
    job = trainings.run(3, (str(STEPS), "7"), "bitflip@gradient:rank=1,step=6")
    assert (job.incidents, _found(job)) == ([], [])


@pytest.mark.parametrize(
    ("every", "way", "reason"),
    [
        (2, "random", "three runs of the forward and backward pass of step 1 give three gradients of"),
        (2, "forgets", "sdc_check_every=2 finds nothing to check in step 1: run the forward and backward pass"),
        (0, "", "sdc_check_every is a number of steps from 1 on (None: no checks), not 0"),
    ],
)
def test_what_cannot_be_checked_is_refused(attempt: Attempt, every: int, way: str, reason: str) -> None:
    job = attempt(3, args=(str(STEPS), str(every), way), code=1)
    assert reason in "\n".join(job.said), job.story()


LIGHTNING = str(SCRIPTS / "lightning_fit.py")
FIT = ("12", "ddp", "accumulate")


def _ends(job: Job) -> list[str]:
    return [line for rank in range(2) for line in job.log(rank).splitlines() if line.startswith("ends with")]


def test_lightning_finds_and_heals_them_and_a_check_is_not_seen_in_what_is_logged(
    trainings_of: TrainingsOf,
) -> None:
    trainings = trainings_of(LIGHTNING)
    calm, checked = trainings.calm(2, *FIT, "check-1000"), trainings.run(2, (*FIT, "check-1"))
    _require_unseen(checked, calm, 12)
    assert _ends(checked) == _ends(calm) != []
    job = trainings.run(
        2, (*FIT, "check-1"), *(f"bitflip@gradient:rank={step % 2},step={step}" for step in range(2, 13, 3))
    )
    assert _found(job) == [(step % 2, step, True) for step in range(2, 13, 3)]
    job.assert_same(calm.steps, 12)
    assert _ends(job) == _ends(calm)


def test_lightning_refuses_sharded_gradients(attempt: Attempt) -> None:
    job = attempt(4, script=LIGHTNING, args=("12", "hsdp", "check-2"), code=1)
    assert "which sharded parameters (FSDP2, DTensors) do not show: leave it out" in "\n".join(job.said)


@pytest.mark.nemo
@pytest.mark.parametrize(("ranks", "more"), [pytest.param(2, (), marks=pytest.mark.long), (4, PP2)])
def test_nemo_finds_and_heals_them(of_recipe: Trainings, ranks: int, more: tuple[str, ...]) -> None:
    args = (*small(4, 5), *DROPOUT, *more)
    every = (*args, "checkpointless.sdc_check_every=1")
    calm = of_recipe.calm(ranks, *args)
    _require_unseen(of_recipe.run(ranks, every), calm, 5)
    job = of_recipe.run(ranks, every, *(f"bitflip@gradient:rank={step % ranks},step={step}" for step in (1, 3, 5)))
    assert {(step % ranks, step, True) for step in (1, 3, 5)} <= {*_found(job)}
    job.assert_same(calm.steps, 5)


@pytest.mark.nemo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("bf16=1", marks=pytest.mark.long),
        "pp=2 tp=2 distributed=0",
        pytest.param("ep=2 distributed=0", marks=pytest.mark.long),
    ],
)
def test_a_loop_over_megatron_core_finds_and_heals_them(trainings_of: TrainingsOf, layout: str) -> None:
    trainings = trainings_of(str(SCRIPTS / "megatron_loop.py"))
    args = ("8", *layout.split())
    calm, every = trainings.calm(4, *args, "check=1000"), (*args, "check=1")
    _require_unseen(trainings.run(4, every), calm, 8)
    places = [(step % 4, step) for step in range(1, 9, 2)]
    kinds = ("gradient", "activation")
    job = trainings.run(
        4, every, *(f"bitflip@{kinds[step // 2 % 2]}:rank={rank},step={step}" for rank, step in places)
    )
    assert {(rank, step, True) for rank, step in places} <= {*_found(job)}
    assert all(incident.steps_lost == 0 for incident in job.incidents)
    job.assert_same(calm.steps, 8)
