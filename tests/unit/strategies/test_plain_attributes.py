"""Test which attributes of a trainer's parts are kept, and how they are put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from checkpointless.integrations.lightning.boundary.plain_attributes import parts_of
from checkpointless.state.rank_local.declared import DeclaredState

pytestmark = pytest.mark.lightning


class Model(pl.LightningModule):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 2)
        self.trained = list(self.net.parameters())
        self.memory = self.net.weight.detach()
        self.generator = torch.Generator().manual_seed(1)
        self.temperature = 1.0


class Slots(Callback):
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean = 1.0


def _state(model: Model, *callbacks: Callback) -> DeclaredState:
    trainer: Any = SimpleNamespace(lightning_module=model, callbacks=list(callbacks))
    return DeclaredState(lambda: parts_of(trainer))


def test_references_to_the_model_stay_those() -> None:
    model = Model()
    taken = dict(_state(model).take())
    fresh = Model()
    weight = fresh.net.weight.detach().clone()
    _state(fresh).put(taken)
    assert torch.equal(fresh.net.weight, weight), "it is put back by itself"
    assert fresh.trained[0] is fresh.net.weight


def test_generators_hyperparameters_and_slots_are_put_back() -> None:
    model, slots = Model(), Slots()
    state = _state(model, slots)
    taken = dict(state.take())
    drawn = torch.rand(2, generator=model.generator)
    model.hparams["alpha"], slots.mean = 0.5, 2.0
    state.put(taken)
    assert torch.equal(torch.rand(2, generator=model.generator), drawn)
    assert (model.hparams["alpha"], slots.mean) == (1.0, 1.0)


def test_attributes_that_were_added_or_deleted_since_are_undone() -> None:
    model: Any = Model()
    state = _state(model)
    taken = dict(state.take())
    model.later = 1.0
    del model.temperature
    without = dict(state.take())
    for put_back, there, gone in ((taken, "temperature", "later"), (without, "later", "temperature")):
        state.put(put_back)
        assert (getattr(model, there), hasattr(model, gone)) == (1.0, False)


def test_another_module_is_named_and_the_models_own_is_not(caplog: pytest.LogCaptureFixture) -> None:
    model, slots = Model(), Slots()
    vars(slots).update(ema=torch.nn.Linear(1, 1), head=model.net, model=model)
    _state(model, slots).take()
    (said,) = caplog.messages
    assert (said.count("Slots."), said.count("Slots.ema")) == (1, 1)


def test_what_is_no_plain_data_on_one_side_stays_as_the_block_has_made_it() -> None:
    """NeMo makes its loss in the first step, and the function that fetches data before it."""
    model, function, more = Model(), torch.nn.ReLU().forward, object()
    vars(model).update(late=function, early=None)
    model.loss = torch.nn.MSELoss()  # NeMo's, which becomes a module in the first step
    taken = dict(_state(model).take())
    fresh = Model()
    made = {"late": None, "early": function, "more": more, "loss": None}
    vars(fresh).update(made)
    _state(fresh).put(taken)
    assert {name: vars(fresh)[name] for name in made} == made
