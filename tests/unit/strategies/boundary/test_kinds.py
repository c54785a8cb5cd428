"""Test what of a checkpoint is known as the work of users' hooks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins import Precision

from checkpointless.strategies.boundary.kinds import of_save_hooks

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
    trainer = SimpleNamespace(
        lightning_module=module, datamodule=data, callbacks=[pl.Callback()], precision_plugin=Precision()
    )
    parts = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "optimizer_states", "loops")
    own = ("callbacks", "lr_schedulers", "Precision", type(data).__qualname__)
    checkpoint = {**dict.fromkeys((*parts, *own), 0), "added": 1}
    assert of_save_hooks(trainer, checkpoint) == found
