"""Test that what is taken of a trainer is what Lightning's loops had then, at every step boundary of a fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

from checkpointless.integrations.lightning.boundary.step_keeper import take_state

pytestmark = pytest.mark.nemo


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
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=2, accumulate_grad_batches=2, callbacks=[compares], barebones=False, **options
    )
    fit_loop: Any = trainer.fit_loop
    fit_loop.val_made, fit_loop.made_at_step = None, 0  # as resumable loops have
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


@pytest.mark.parametrize("where", ["callback", "module", "module's attribute"])
def test_hooks_that_save_see_the_whole_checkpoint_and_add_to_it(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = fit(torch.utils.data.DataLoader(RandomDataset(32, 5)))
    kept = [1]

    def save(*given: Any) -> None:
        given[-1]["mine"] = kept, given[-1]["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"]

    class Saves(Callback):
        """Adds to a checkpoint."""

        on_save_checkpoint = save  # type: ignore[assignment]

    take_state(trainer)
    module: Any = trainer.lightning_module
    if where == "callback":
        trainer.callbacks.append(Saves())  # type: ignore[attr-defined]
    elif where == "module":
        monkeypatch.setattr(
            trainer.strategy, "_lightning_module", type("Own", (BoringModel,), {"on_save_checkpoint": save})()
        )
    else:
        module.on_save_checkpoint = save
    taken = take_state(trainer)
    kept.append(2)
    assert taken()["checkpoint"]["mine"] == ([1], 2)
