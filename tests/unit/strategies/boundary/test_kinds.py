"""Test what of a checkpoint is known as the work of users' hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins import Precision

from checkpointless.strategies.boundary.kinds import _Asked, of_save_hooks

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
    trainer = SimpleNamespace(
        lightning_module=module, datamodule=data, callbacks=[pl.Callback()], precision_plugin=Precision()
    )
    parts = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "optimizer_states", "loops")
    own = ("callbacks", "lr_schedulers", "Precision", type(data).__qualname__)
    checkpoint = {**dict.fromkeys((*parts, *own), 0), "added": 1}
    assert of_save_hooks(trainer, checkpoint) == found


def test_who_is_asked_follows_what_the_trainer_has() -> None:
    callback = pl.Callback()
    trainer = SimpleNamespace(
        lightning_module=pl.LightningModule(),
        datamodule=None,
        callbacks=[callback],
        precision_plugin=Precision(),
        strategy=None,
        fit_loop=SimpleNamespace(),
    )
    asked = _Asked.of(trainer)
    assert _Asked.of(trainer) is asked
    assert not asked.stateful
    vars(callback)["state_dict"] = lambda: {"count": 1}
    assert _Asked.of(trainer).stateful == [callback]
    assert not _Asked.of(trainer).has_save_hooks
    vars(callback)["on_save_checkpoint"] = lambda trainer, module, checkpoint: None
    assert _Asked.of(trainer).has_save_hooks
    trainer.datamodule = Positioned()  # of the trainer's next fit
    assert _Asked.of(trainer).data_has_state
    trainer.precision_plugin = HalfPrecision()
    assert _Asked.of(trainer).precision is trainer.precision_plugin
