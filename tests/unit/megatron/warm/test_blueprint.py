"""Test that a change of a built model is noticed, and that equal configurations are taken for equal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from checkpointless.megatron.warm.blueprint import Blueprint, alike, differing, unknown_class


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
    built = Blueprint([net])
    assert built.difference([net]) is None
    CHANGES[change](net)
    assert built.difference([net])


def test_training_changes_nothing() -> None:
    net = model()
    built = Blueprint([net])
    net(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.eval()
    assert built.difference([net]) is None


def test_only_classes_whose_state_is_known_are_kept() -> None:
    class Own(torch.nn.Module):
        """A layer of the user's."""

    assert unknown_class([model()]) is None
    assert "Own" in str(unknown_class([torch.nn.Sequential(Own())]))


@dataclass
class Settings:
    size: int
    start: Any


class Bare:
    """A value without an equality of its own, and without attributes."""


def normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def start(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.normal_(tensor, std=sigma)

    return start


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (normal(0.1), normal(0.1), True),
        (normal(0.1), normal(0.2), False),
        (functools.partial(hook, 1, key=2), functools.partial(hook, 1, key=2), True),
        (functools.partial(hook, 1, key=2), functools.partial(hook, 1, key=3), False),
        (functools.partial(hook, 1), functools.partial(print, 1), False),
        ([1, {"a": (2, None)}], [1, {"a": (2, None)}], True),
        ([1, {"a": (2, None)}], [1, {"a": (3, None)}], False),
        (Settings(1, torch.float32), Settings(1, torch.float32), True),
        (Settings(1, torch.float32), Settings(1, torch.bfloat16), False),
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.zeros(2), False),
        (Bare(), Bare(), False),
        (None, 0, False),
    ],
)
def test_what_is_alike(then: Any, now: Any, same: bool) -> None:
    assert alike(then, now) is same
    assert differing({"a": 1, "b": then}, {"a": 1, "b": now}) == (None if same else "b")


def test_a_value_that_is_missing_differs() -> None:
    assert differing({"a": 1}, {}) == "a"
    assert differing({}, {"a": 1}) == "a"
