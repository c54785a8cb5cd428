"""Test what of a checkpoint is known as the work of users' hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from checkpointless.integrations.lightning.boundary.step_keeper import (
    _load_again,
    _of_save_hooks,
    _put_of_epoch,
    _take_settings,
    take_state,
)
from checkpointless.state.serialization import state_tree

pytestmark = pytest.mark.nemo


class Adds:
    """Has a hook of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = 1


class Module(Adds, pl.LightningModule): ...


class Data(Adds, pl.LightningDataModule): ...


@pytest.mark.parametrize(
    ("module", "data", "found"),
    [
        (Module(), None, {"added": 1}),
        (Module(), Data(), {"added": 1}),
        (pl.LightningModule(), Data(), {}),
        (pl.LightningModule(), pl.LightningDataModule(), {}),
    ],
    ids=["module", "both", "data", "nobody"],
)
def test_what_hooks_have_added(module: Any, data: Any, found: dict[str, Any]) -> None:
    """Lightning's own parts are none of theirs, nor the states of precision plugin and data module.

    Of a data module, Lightning asks ``state_dict`` alone, so that a method of such a name means nothing.
    """
    trainer: Any = SimpleNamespace(
        lightning_module=module, datamodule=data, callbacks=[pl.Callback()], precision_plugin=Precision()
    )
    parts = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "optimizer_states", "loops")
    own = ("callbacks", "lr_schedulers", "Precision", type(data).__qualname__)
    checkpoint = {**dict.fromkeys((*parts, *own), 0), "added": 1}
    assert _of_save_hooks(trainer, checkpoint) == found


class Owns:
    """Returns its own dict as its state, and takes any other."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = dict(state_dict)


class OwnsAsCallback(Owns, pl.Callback): ...


class OwnsAsData(Owns, pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(RandomDataset(32, 4))


def trainer_with(**options: Any) -> Any:
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Any = pl.Trainer(accelerator="cpu", **silent, **options)
    trainer.fit_loop.val_made, trainer.fit_loop.made_at_step = None, 0  # as resumable loops have
    return trainer


def fitted(**options: Any) -> Any:
    """Return a trainer whose loops have begun."""
    trainer = trainer_with(max_steps=2, limit_val_batches=0, **options)
    trainer.fit(BoringModel(), datamodule=OwnsAsData())
    return trainer


def test_a_callback_whose_state_was_empty_is_emptied_again() -> None:
    """Lightning gives an empty state to no callback, so that what hooks at the start had put in would stay."""
    trainer = fitted(callbacks=[callback := OwnsAsCallback()])
    checkpoint = take_state(trainer)()["checkpoint"]
    callback.seen["n"] = 1
    _load_again(trainer, checkpoint)
    assert callback.seen == {}


# --- That what is taken of a trainer is what Lightning's loops had then, at every step boundary of a fit ----------


class Compares(Callback):
    """Takes the state in every hook in which a step or an epoch begins or ends."""

    def __init__(self) -> None:
        self.taken: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []

    def take(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Take it both ways."""
        self.taken.append((copy.deepcopy(trainer.fit_loop.state_dict()), take_state(trainer)))

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = take
    on_validation_batch_end = on_validation_end = on_before_zero_grad = on_train_end = take


class Stateful:
    """A loader that counts what it has delivered."""

    def __init__(self) -> None:
        self.state = {"delivered": [0]}

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(3):
            self.state["delivered"][0] += 1
            yield torch.ones(2, 32)

    def state_dict(self) -> dict[str, Any]:
        """Return what it goes on counting with."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self.state = state


def fit(loader: Any) -> tuple[pl.Trainer, Compares]:
    compares = Compares()
    trainer = trainer_with(max_epochs=2, accumulate_grad_batches=2, callbacks=[compares])
    trainer.fit(BoringModel(), loader, torch.utils.data.DataLoader(RandomDataset(32, 4)))
    return trainer, compares


@pytest.mark.parametrize("make", [lambda: torch.utils.data.DataLoader(RandomDataset(32, 5)), Stateful])
def test_every_moment_is_as_lightning_has_it_and_stays(make: Callable[[], Any]) -> None:
    _, compares = fit(make())
    assert len(compares.taken) > 20
    assert len({str(theirs) for theirs, _ in compares.taken}) > 10
    for theirs, mine in compares.taken:
        loops = mine()["checkpoint"]["loops"]  # made when the fit is over
        assert loops == {"fit_loop": theirs} or (
            loops is None and theirs["epoch_progress"]["current"]["ready"] == 0
        )


def test_a_checkpoint_has_what_callbacks_and_schedulers_had_when_it_was_taken() -> None:
    class Counts(Callback):
        """Has a state that it changes in place."""

        def __init__(self) -> None:
            self.state = {"seen": [1]}

        def state_dict(self) -> dict[str, Any]:
            return self.state

    trainer, _ = fit(torch.utils.data.DataLoader(RandomDataset(32, 5)))
    counts = Counts()
    trainer.callbacks.append(counts)  # type: ignore[attr-defined]
    (schedule,) = [config.scheduler for config in trainer.lr_scheduler_configs]
    rates = list(schedule.state_dict()["_last_lr"])
    taken = take_state(trainer)
    counts.state["seen"].append(2)
    schedule.state_dict()["_last_lr"][0] = 99.0
    trainer.fit_loop.epoch_progress.total.completed = 55
    checkpoint = taken()["checkpoint"]
    assert checkpoint["callbacks"] == {counts.state_key: {"seen": [1]}}
    assert checkpoint["lr_schedulers"][0]["_last_lr"] == rates
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"] == 2
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (2, 6)
    assert (checkpoint["state_dict"], checkpoint["optimizer_states"]) == ({}, [])


# --- What of a trainer is put back after hooks have changed it ----------------------------------------------------


def trained() -> Any:
    trainer = trainer_with(max_epochs=1, limit_train_batches=3)
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(RandomDataset(32, 4)))
    return trainer


@pytest.fixture
def trainer() -> Any:
    """Return a trainer that has trained."""
    return trained()


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


@pytest.mark.parametrize("is_due", [True, False], ids=["reload", "none"])
def test_an_epoch_with_a_loader_of_its_own_keeps_what_that_loader_has(trainer: Any, is_due: bool) -> None:
    trainer.fit_loop.max_batches, trainer.val_check_batch = 77, 78
    state = _take_settings(trainer)
    state["reload_dataloaders_every_n_epochs"] = 1 if is_due else 0
    fresh = trained()
    _put_of_epoch(fresh, state, begins_epoch=True)
    assert (fresh.fit_loop.max_batches, fresh.val_check_batch) == ((3, 3) if is_due else (77, 78))
