"""Test what of a trainer is put back after hooks have changed it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.utilities import GradClipAlgorithmType

from checkpointless.integrations.lightning.boundary.step_keeper import (
    OF_LOADERS,
    _put_of_epoch,
    _put_settings,
    _take_settings,
    take_state,
)
from checkpointless.state.serialization import state_tree

pytestmark = pytest.mark.nemo


@pytest.fixture
def trainer() -> Any:
    """Return a trainer that has trained."""
    return trained()


def trained() -> Any:
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Any = pl.Trainer(accelerator="cpu", max_epochs=1, limit_train_batches=3, **silent)
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(RandomDataset(32, 4)))
    trainer.fit_loop.val_made, trainer.fit_loop.made_at_step = None, 0  # as resumable loops have
    return trainer


CHANGES: dict[str, Any] = {
    "accumulate_grad_batches": 3,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": GradClipAlgorithmType.VALUE,
    "val_check_batch": 2,
    "val_check_interval": 0.5,
    "check_val_every_n_epoch": 7,
    "log_every_n_steps": 9,
    "reload_dataloaders_every_n_epochs": 5,
    "fit_loop.max_epochs": 11,
    "fit_loop.min_epochs": 2,
    "fit_loop.max_batches": 4,
    "fit_loop.epoch_loop.max_steps": 33,
    "fit_loop.epoch_loop.min_steps": 3,
}


def owner_of(trainer: Any, name: str) -> tuple[Any, str]:
    *path, last = name.split(".")
    for each in path:
        trainer = getattr(trainer, each)
    return trainer, last


def test_what_was_taken_is_put_into_a_trainer_that_was_made_anew(trainer: Any) -> None:
    for name, value in CHANGES.items():
        setattr(*owner_of(trainer, name), value)
    state = take_state(trainer)()["kinds"]["settings"]
    state_tree.check(state)  # it travels
    fresh = trained()
    before = {name: getattr(*owner_of(fresh, name)) for name in CHANGES}
    assert all(before[name] != value for name, value in CHANGES.items())
    _put_of_epoch(fresh, state)
    assert {name: getattr(*owner_of(fresh, name)) for name in CHANGES} == CHANGES
    assert isinstance(fresh.gradient_clip_algorithm, GradClipAlgorithmType)


def test_what_was_taken_does_not_follow_later_changes(trainer: Any) -> None:
    taken = take_state(trainer)
    trainer.accumulate_grad_batches = 5
    assert taken()["kinds"]["settings"]["accumulate_grad_batches"] == 1


@pytest.mark.parametrize("is_due", [True, False], ids=["reload", "none"])
def test_an_epoch_with_a_loader_of_its_own_keeps_what_that_loader_has(trainer: Any, is_due: bool) -> None:
    trainer.fit_loop.max_batches, trainer.val_check_batch = 77, 78
    state = _take_settings(trainer)
    state["reload_dataloaders_every_n_epochs"] = 1 if is_due else 0
    fresh = trained()
    _put_of_epoch(fresh, state, begins_epoch=True)
    assert (fresh.fit_loop.max_batches, fresh.val_check_batch) == ((3, 3) if is_due else (77, 78))


def test_before_the_loader_is_made_only_what_makes_it_is_put(trainer: Any) -> None:
    state = _take_settings(trainer)
    fresh = trained()
    _put_settings(fresh, {**state, "val_check_interval": 0.25, "accumulate_grad_batches": 4}, OF_LOADERS)
    assert (fresh.val_check_interval, fresh.accumulate_grad_batches) == (0.25, 1)
