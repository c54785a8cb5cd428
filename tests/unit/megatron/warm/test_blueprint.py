"""Test that a change of a built model is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version

from checkpointless.integrations.megatron import warm
from checkpointless.integrations.megatron.warm import _Blueprint, _unknown_class

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(2))


def hook(*_: object, key: int = 0) -> None:
    """Do nothing."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda net: net[0].register_forward_hook(hook),
    "a hook of a parameter": lambda net: net[0].weight.register_hook(hook),
    "a hook after accumulation": lambda net: net[0].weight.register_post_accumulate_grad_hook(hook),
    "an attribute": lambda net: setattr(net[1], "p", 0.5),
    "a new attribute": lambda net: setattr(net[1], "calls", []),
    "a frozen parameter": lambda net: net[0].weight.requires_grad_(False),
    "another parameter": lambda net: setattr(net[0], "weight", torch.nn.Parameter(torch.zeros(2, 2))),
    "a part more": lambda net: net.append(torch.nn.ReLU()),
    "a part less": lambda net: net.pop(2),
    "another part": lambda net: net.__setitem__(1, torch.nn.ReLU()),
    "a larger buffer": lambda net: net[2].register_buffer("running_mean", torch.zeros(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_model_is_noticed(change: str) -> None:
    net = model()
    built = _Blueprint([net])
    assert built.difference([net]) is None
    CHANGES[change](net)
    assert built.difference([net])


def test_training_changes_nothing() -> None:
    net = model()
    built = _Blueprint([net])
    net(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.eval()
    assert built.difference([net]) is None


def test_only_classes_whose_state_is_known_are_kept() -> None:
    class Own(torch.nn.Module):
        """A layer of the user's."""

    assert _unknown_class([model()]) is None
    assert "Own" in str(_unknown_class([torch.nn.Sequential(Own())]))


# --- TransformerEngine's modules: classes with their names and attributes -----------------------------------------


def named(full_name: str, base: type = torch.nn.Module) -> Any:
    """Return a class of a module of this name."""
    package, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": package})


BASE = named("transformer_engine.pytorch.module.base.TransformerEngineBaseModule")
LINEAR = named("transformer_engine.pytorch.module.linear.Linear", BASE)
ROW = named("megatron.core.extensions.transformer_engine.TERowParallelLinear", LINEAR)
OPERATION = named("transformer_engine.pytorch.ops.op.BasicOperation")
NORM = named("transformer_engine.pytorch.ops.basic.rmsnorm.RMSNorm", OPERATION)


def test_a_note_of_a_forward_pass_is_no_change_and_a_hook_is(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ROW()
    layer.activation_dtype = None
    built = _Blueprint([layer])
    layer.activation_dtype, layer.forwarded_at_least_once = torch.bfloat16, True
    assert built.difference([layer]) is None
    layer.register_forward_hook(hook)
    assert built.difference([layer])


@pytest.mark.parametrize(
    ("release", "known"), [("2.5.0", False), ("2.6.0", True), ("2.12.1", True), ("3.0", False)]
)
def test_only_versions_of_the_engine_that_were_read(
    monkeypatch: pytest.MonkeyPatch, release: str, known: bool
) -> None:
    monkeypatch.setattr(warm, "get_te_version", lambda: Version(release))
    assert (_unknown_class([ROW(), NORM()]) is None) == known
    assert _unknown_class([torch.nn.ReLU()]) is None, "no matter what is installed"


def test_only_classes_of_the_engine_that_were_read() -> None:
    for name in (
        "transformer_engine.pytorch.transformer.TransformerLayer",
        "transformer_engine.pytorch.ops.sequential.Sequential",
        "megatron.core.extensions.kitchen.KitchenLinear",
    ):
        assert _unknown_class([torch.nn.Sequential(named(name, BASE)())]) == name
