"""Test that a module which outlives a generation is as its script made it when the next one sets it up."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from checkpointless.inprocess.finalize import CheckpointlessFinalizeCleanup
from checkpointless.strategies.megatron_strategy import _note_given_module

pytestmark = pytest.mark.nemo


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.nn.Linear(2, 2)
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return "the class's"


def set_up(model: Model) -> None:
    """Do what NeMo's set-up does to a module."""
    model.module = torch.nn.Linear(3, 3)
    model.configure_optimizers = lambda: "the old strategy's"  # type: ignore[method-assign]
    model.register_buffer("table", torch.ones(2))
    model.norms.append(1.0)
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_all_modules_of_all_fits_are_as_they_were_before_the_first_one() -> None:
    models = [Model(), Model()]
    weights = [model.kept.weight for model in models]
    for _ in range(2):
        for model in models:
            _note_given_module(model)
            set_up(model)
    CheckpointlessFinalizeCleanup()()
    for model, weight in zip(models, weights):
        assert not hasattr(model, "module")
        assert not hasattr(model, "table")
        assert model.configure_optimizers() == "the class's"
        assert model.kept.weight is weight
        assert [name for name, _ in model.named_parameters()] == ["kept.weight", "kept.bias"]
        assert model.norms == [1.0, 1.0]
        assert model._trainer is None
