"""Test what a block hands itself past its arguments: notes of a data module's ``setup``, a model from outside."""

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Trainings

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT, STEPS = str(SCRIPTS / "lightning_fit.py"), 6
ARGS = (str(STEPS), "ddp")
LONG = [pytest.param(word, marks=pytest.mark.long) for word in ("hparams", "buffer")]


@pytest.mark.parametrize("word", ["attribute", *LONG])
def test_a_setup_that_tells_others_of_its_data(trainings: Trainings, word: str) -> None:
    trainings.rough(2, (*ARGS, word), "exception@backward:rank=1,step=3", steps=STEPS)


def test_a_module_from_outside_is_as_good_under_lightning(trainings: Trainings) -> None:
    """The old trainer's wrapper is gone, and DDP writes the weights of a new rank 0 to nothing that is held."""
    faults = (
        "exception@backward:rank=1,step=2",
        "sigkill@backward:rank=0,step=3",
        "sigkill@optimizer:rank=1,step=4",
        "exception@forward:rank=0,step=6",
    )
    trainings.rough(2, (*ARGS, "outside"), *faults, steps=STEPS)


def test_a_module_from_outside_keeps_the_gradients_of_an_update_that_is_still_to_be_made(
    trainings: Trainings,
) -> None:
    """The next trainer, which has the same module, clears them before rank 1 makes the update."""
    fault = "exception@after_optimizer:rank=0,step=3"
    job = trainings.rough(2, (*ARGS, "outside"), fault, steps=STEPS, more=("late",))
    assert [event.fields["redo"] for event in job.events("decide", "end")] == [[1], [1]]


@pytest.mark.long
def test_ranks_that_have_no_state_yet_begin_with_the_weights_of_the_first(trainings: Trainings) -> None:
    """After a fault DDP wraps without its first broadcast, as ranks may hold the state; here none does."""
    job = trainings.rough(2, (*ARGS, "seeded-apart"), more=("raises-first",))
    assert len(job.incidents) == 1, job.story()
    last = [records[-1].params for records in job.steps.values()]
    assert last[0] == last[1], "or nothing was shown"


def test_a_module_from_outside_that_gets_the_weights_of_a_new_process_is_no_source(attempt: Attempt) -> None:
    """In a loop of one's own, DDP gives all ranks the weights of rank 0, which has just been made."""
    script, fault = str(SCRIPTS / "plain_habits.py"), "sigkill@backward:rank=0,step=3"
    job = attempt(2, script=script, args=(str(STEPS), "outside"), faults=(fault,), code=1)
    assert "0.weight was written to since the fault: what the block trains must be built in it" in job.log(1)
    assert all(record.step < 3 for rank in range(2) for record in job.steps.get(rank, ())), "it trained on"
