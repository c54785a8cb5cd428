"""torchtitan's Trainer comes through faults in every phase, with the bits of a calm run: two replicas of shards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.integrations import torchtitan as adapter
from tests.ranks.example_diffs import EXAMPLES
from tests.ranks.jobs import Job, Trainings

ranks = pytest.mark.ranks
STEPS = 9
# With accumulation, clipping and a schedule; four steps are a pass over the data.
SCRIPT, SETTINGS = str(EXAMPLES / "train_torchtitan.py"), {"limit_s": 600.0}
MODULE = ("--module", "tests.titan.small", "--config")


def _rough(trainings: Trainings, *faults: str, config: str = "small") -> Job:
    calm, job = trainings.calm(4, *MODULE, "small"), trainings.run(4, (*MODULE, config), *faults)
    job.assert_same(calm.steps, STEPS)
    saves = [sorted(each.name for each in (run.run_dir / "out/checkpoint").iterdir()) for run in (calm, job)]
    assert saves[0] == saves[1]
    assert "step-8" in saves[0]
    return job


@ranks
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_every_phase(trainings: Trainings, kind: str) -> None:
    """In two passes over the data; step 4 is followed by a save, and step 6 by a validation."""
    phases = {"forward": 1, "backward": 2, "optimizer": 4, "after_optimizer": 5, "between": 6, "data": 8}
    phases["before_optimizer"] = 9
    _rough(trainings, *(f"{kind}@{phase}:rank={step % 4},step={step}" for phase, step in phases.items()))


@ranks
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("what", ["validation", "save"])
def test_what_follows_an_update_is_made_again(trainings: Trainings, what: str) -> None:
    job = _rough(trainings, config=f"fails_in_a_{what}")
    (incident,) = job.incidents
    assert incident.resumed_after == {"validation": 6, "save": 4}[what]
    assert f"asked for, in a {what}" in job.story()


# --- what cannot be carried through a fault -----------------------------------------------------------------------


def _trainer(**changed: Any) -> Any:
    training = SimpleNamespace(disable_cuda_graphs=changed.pop("disable_cuda_graphs", True))
    loader = SimpleNamespace(num_workers=changed.pop("num_workers", 0))
    checkpoint = SimpleNamespace(**{"enable": True, "async_mode": "disabled"} | changed)
    parts = dict.fromkeys(adapter._SEAMS) | {"dataloader": loader}
    return SimpleNamespace(config=SimpleNamespace(training=training, checkpoint=checkpoint), **parts)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"disable_cuda_graphs": False}, "set --training.disable_cuda_graphs"),
        ({"num_workers": 2}, "set --dataloader.num_workers 0"),
        ({"async_mode": "async"}, "set --checkpoint.async_mode disabled"),
    ],
)
def test_a_setting_is_refused(changed: dict[str, Any], said: str) -> None:
    assert adapter._refusal(_trainer()) is None
    assert said in (adapter._refusal(_trainer(**changed)) or "")


def test_an_unknown_trainer_is_refused() -> None:
    trainer = _trainer()
    del trainer.train_step
    assert "has no Trainer.train_step" in (adapter._refusal(trainer) or "")


def test_outside_of_a_block_it_is_the_trainers_own() -> None:
    called: list[str] = []
    adapter.train(SimpleNamespace(train=lambda: called.append("train")))  # type: ignore[arg-type]
    assert called == ["train"]
