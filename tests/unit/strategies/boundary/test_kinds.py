"""Test that what is taken of a trainer is what Lightning's loops, callbacks and schedulers had then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

from checkpointless.integrations.lightning.boundary.step_keeper import (
    _load_again,
    take_state,
)

pytestmark = pytest.mark.nemo


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
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
