"""Test that a change of a built model is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpointless.integrations.megatron.warm.known_classes import blueprint_of, unknown_class

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
    built = blueprint_of([net])
    assert built.difference([net]) is None
    CHANGES[change](net)
    assert built.difference([net])


def test_training_changes_nothing() -> None:
    net = model()
    built = blueprint_of([net])
    net(torch.ones(3, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.eval()
    assert built.difference([net]) is None


def test_only_classes_whose_state_is_known_are_kept() -> None:
    class Own(torch.nn.Module):
        """A layer of the user's."""

    assert unknown_class([model()]) is None
    assert "Own" in str(unknown_class([torch.nn.Sequential(Own())]))
