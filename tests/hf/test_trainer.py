"""Hugging Face's Trainer comes through faults in every phase, with the bits and the callbacks of a calm run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.ranks.jobs import PHASES, Attempt, Job, Trainings

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).with_name("trains.py"))
SETTINGS = {"limit_s": 280.0, "heartbeat_timeout_s": 100.0}  # compiling takes its time on a busy machine
STEPS = 16
WORKERS = ("dataloader_num_workers=2", "dataloader_persistent_workers=true", "max_steps=9", "save_steps=5")


def _left(job: Job) -> list[str]:
    """Return what each rank printed at the end: its log without times, its callback's attributes, tokens, loss."""
    ranks = range(len(job.steps))
    return [line for rank in ranks for line in job.log(rank).splitlines() if line.startswith("left ")]


def _rough(
    trainings: Trainings, ranks: int, steps: int, args: tuple[str, ...], *faults: str, more: tuple[str, ...] = ()
) -> Job:
    job = trainings.rough(ranks, args, *faults, steps=steps, more=more)
    assert _left(job) == _left(trainings.calm(ranks, *args))
    assert len(_left(job)) == ranks
    return job


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_every_phase(trainings: Trainings, kind: str) -> None:
    faults = (f"{kind}@{phase}:rank={at % 4},step={2 * at + 2}" for at, phase in enumerate(PHASES))
    job = _rough(trainings, 4, STEPS, (), *faults)
    resumed = [each.resumed_after for each in job.incidents]
    # In the update of step 10 the others go on if they have the averaged gradients before the fault reaches them.
    assert resumed.pop(PHASES.index("optimizer")) in (9, 10), job.story()
    assert resumed == [1, 3, 5, 7, 12, 14], job.story()


def test_what_follows_an_update_is_made_again(trainings: Trainings) -> None:
    """In an evaluation, in a save, at the end of an epoch, behind the last step; one fault right after another."""
    faults = (
        "sigkill@after_optimizer:rank=1,step=3",
        "sigkill@data:rank=2,step=8",
        "sigkill@data:rank=3,step=9",
        "sigkill@between:rank=2,step=12",
        "exception@between:rank=3,step=16",
    )
    fails = json.dumps({"evaluate": 6, "save": 8})
    job = _rough(trainings, 4, STEPS, (), *faults, more=(f"fails={fails}",))
    assert all(f"asked for, in {where}" in job.story() for where in ("evaluate", "save")), job.story()
    assert 5 <= len(job.incidents) <= 7, job.story()  # one fault may come while another one is handled
    saves = [sorted(each.name for each in (run.run_dir / "saves").iterdir()) for run in (trainings.calm(4), job)]
    assert saves[0] == saves[1] == ["checkpoint-12", "checkpoint-16"]


def test_workers_draw_the_same(trainings: Trainings) -> None:
    """Persistent workers exchange items at random, in the second epoch, too."""
    faults = ("exception@forward:rank=0,step=2", "sigkill@backward:rank=1,step=4", "dataloader@data:rank=1,step=9")
    _rough(trainings, 2, 9, WORKERS, *faults)


@pytest.mark.parametrize("more", [(), ("holds=true",)], ids=["", "held"])
def test_resuming_from_a_save(trainings: Trainings, more: tuple[str, ...]) -> None:
    """A job that begins with a checkpoint of the Trainer saves as it would have after a fault.

    Held, a rank has begun no step when another one fails in it: all resume before the Trainer has loaded streams.
    """
    resume = f"resume={json.dumps(str(trainings.calm(4).run_dir / 'saves/checkpoint-12'))}"
    faults = (
        "exception@forward:rank=0,step=13",
        "sigkill@optimizer:rank=1,step=14",
        "sigkill@between:rank=2,step=15",
    )
    _rough(trainings, 4, 4, (resume,), *faults, more=more)


def test_a_compiled_model(trainings: Trainings) -> None:
    compiled = ("torch_compile=true", 'torch_compile_backend="aot_eager"', "max_steps=5")
    faults = ("exception@backward:rank=1,step=2", "sigkill@forward:rank=1,step=4")
    job = _rough(trainings, 2, 5, compiled, *faults)
    assert all(re.search(r"^graphs: [1-9]", job.log(rank), re.M) for rank in (0, 1))


def test_draws_ahead_of_a_step_are_refused(attempt: Attempt) -> None:
    job = attempt(2, args=("noisy=true",), code=1)
    assert "let a worker draw them (dataloader_num_workers=1)" in "\n".join(job.said)
