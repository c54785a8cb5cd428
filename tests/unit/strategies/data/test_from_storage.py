"""Test where the data go on after a checkpoint on storage was loaded that holds nothing of that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.integrations.lightning.recoverable_strategy import _StoredPosition
from checkpointless.launcher.protocol.board import Facts
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.scribe import scribe

pytestmark = pytest.mark.lightning


def sampler(**options: Any) -> Any:
    counted = {"init_consumed_samples": 0, "prev_consumed_samples": 0, "init_global_step": 0}
    return SimpleNamespace(global_batch_size=8, rampup_batch_size=None, if_first_step=0, **{**counted, **options})


def trainer_of(data_sampler: Any, epoch: int = 0, ready: int = 0, ended: bool = False) -> Any:
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready), is_last_batch=ended)
    return SimpleNamespace(
        strategy=SimpleNamespace(data_sampler=data_sampler),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        current_epoch=epoch,
        global_step=104,
    )


@pytest.fixture
def facts() -> Facts:
    facts = Facts(None)
    _StoredPosition(trainer_of(sampler()), facts).begin(100)  # the script had loaded a checkpoint of its own
    return facts


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHECKPOINTLESS_RUN_DIR", str(tmp_path))
    return tmp_path


def told(run_dir: Path) -> list[str]:
    assert scribe.flush()
    return [event.fields["reason"] for event in read_events(run_dir)] if (run_dir / "events.jsonl").exists() else []


def test_nemos_sampler_goes_on_behind_the_steps_that_the_checkpoint_has(facts: Facts, run_dir: Path) -> None:
    trainer = trainer_of(sampler())
    _StoredPosition(trainer, facts).resume(104)
    again = trainer.strategy.data_sampler
    assert (again.init_consumed_samples, again.prev_consumed_samples, again.init_global_step) == (32, 32, 104)
    assert again.if_first_step == 1
    assert told(run_dir) == []


def test_a_data_module_that_keeps_its_position_is_let_be(facts: Facts, run_dir: Path) -> None:
    trainer = trainer_of(sampler(init_consumed_samples=832))
    _StoredPosition(trainer, facts).resume(104)
    assert trainer.strategy.data_sampler.init_consumed_samples == 832
    assert told(run_dir) == []


def test_a_training_that_starts_over_has_its_data_counted_from_there(facts: Facts) -> None:
    _StoredPosition(trainer_of(sampler()), facts).resume(0)
    trainer = trainer_of(sampler())
    _StoredPosition(trainer, facts).resume(50)
    assert trainer.strategy.data_sampler.init_consumed_samples == 400


@pytest.mark.parametrize("odd", [{"rampup_batch_size": [4, 4, 100]}, {"epoch": 1}])
def test_where_the_position_does_not_follow_from_the_step_that_is_said(
    facts: Facts, run_dir: Path, odd: dict[str, Any]
) -> None:
    epoch = odd.pop("epoch", 0)
    made = sampler()
    vars(made).update(odd)
    _StoredPosition(trainer_of(made, epoch=epoch), facts).resume(104)
    assert made.init_consumed_samples == 0
    (reason,) = told(run_dir)
    assert reason.startswith("the data begin anew after step 104: the checkpoint does not hold their position")


@pytest.mark.parametrize(
    ("progress", "is_said"), [({"ready": 3}, True), ({"ready": 3, "ended": True}, False), ({}, False)]
)
def test_a_loader_without_a_state_begins_anew_within_an_epoch(
    facts: Facts, run_dir: Path, progress: dict[str, Any], is_said: bool
) -> None:
    position = _StoredPosition(trainer_of(None, **progress), facts)
    position.resume(104)
    position.made([1, 2])
    position.made([1, 2])  # of the next epoch
    assert len(told(run_dir)) == is_said
