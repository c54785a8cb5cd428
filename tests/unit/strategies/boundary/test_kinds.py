"""Test what of a checkpoint is known as the work of users' hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins import Precision

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.boundary.step_keeper import _load_again, _of_save_hooks, take_state

pytestmark = pytest.mark.nemo


class Adds:
    """Has a hook of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = 1


class Module(Adds, pl.LightningModule): ...


class Data(Adds, pl.LightningDataModule): ...


class Positioned(pl.LightningDataModule):
    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}


class HalfPrecision(Precision):
    def state_dict(self) -> dict[str, Any]:
        return {"scale": 2.0}


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


def test_who_is_asked_follows_what_the_trainer_has() -> None:
    callback = pl.Callback()
    trainer = fitted(callbacks=[callback])
    assert take_state(trainer)()["checkpoint"]["callbacks"] == {}
    vars(callback)["state_dict"] = lambda: {"count": 1}
    vars(callback)["on_save_checkpoint"] = lambda trainer, module, checkpoint: checkpoint.update(added=1)
    taken = take_state(trainer)()["checkpoint"]
    assert (taken["callbacks"], taken["added"]) == ({callback.state_key: {"count": 1}}, 1)
    trainer.datamodule = Positioned()  # of the trainer's next fit
    trainer.strategy.precision_plugin = HalfPrecision()
    taken = take_state(trainer)()["checkpoint"]
    assert (taken["Positioned"], taken["HalfPrecision"]) == ({"position": 3}, {"scale": 2.0})


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


def fitted(**options: Any) -> Any:
    """Return a trainer whose loops have begun."""
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Any = pl.Trainer(accelerator="cpu", max_steps=2, limit_val_batches=0, **silent, **options)
    trainer.fit_loop.val_made, trainer.fit_loop.made_at_step = None, 0  # as resumable loops have
    trainer.fit(BoringModel(), datamodule=OwnsAsData())
    return trainer


def test_a_state_that_was_empty_stays_empty_when_its_owner_fills_it() -> None:
    trainer = fitted(callbacks=[callback := OwnsAsCallback()])
    taken = take_state(trainer)
    trainer.datamodule.seen["n"] = callback.seen["n"] = 1
    checkpoint = taken()["checkpoint"]
    assert checkpoint["OwnsAsData"] == {}
    assert checkpoint["callbacks"] == {}


def test_a_callback_whose_state_was_empty_is_emptied_again() -> None:
    """Lightning gives an empty state to no callback, so that what hooks at the start had put in would stay."""
    trainer = fitted(callbacks=[callback := OwnsAsCallback()])
    checkpoint = take_state(trainer)()["checkpoint"]
    callback.seen["n"] = 1
    _load_again(trainer, checkpoint)
    assert callback.seen == {}


def test_a_callback_that_takes_no_empty_state_is_named() -> None:
    class Strict(OwnsAsCallback):
        """Takes only what it has written itself."""

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen = {"n": state_dict["n"]}

    trainer = fitted(callbacks=[callback := Strict()])
    checkpoint = take_state(trainer)()["checkpoint"]
    _load_again(trainer, checkpoint)  # it is empty still
    callback.seen["n"] = 1
    with pytest.raises(UnrecoverableError, match="the state of Strict was empty before the fault"):
        _load_again(trainer, checkpoint)
