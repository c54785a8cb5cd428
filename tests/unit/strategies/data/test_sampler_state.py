"""Test what samplers keep for themselves: that it is taken and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, Sampler

from checkpointless.integrations.lightning.data.loaders import _SamplerState
from checkpointless.state.serialization import state_tree

pytestmark = pytest.mark.nemo


class Keeps(Sampler[int]):
    """Keeps what it is given."""

    def __init__(self, **kept: Any) -> None:
        for name, value in kept.items():
            setattr(self, name, value)

    def __iter__(self) -> Any:
        return iter(())


class Other(Keeps):
    """A sampler of another class."""


def taken(*owners: object) -> dict[str, Any]:
    """Return what is kept, as another process gets it."""
    state: dict[str, Any] = state_tree.loads(state_tree.dumps(_SamplerState([None, *owners]).take()))
    return state


def test_numbers_of_a_users_sampler() -> None:
    state = taken(Keeps(epoch=4, ratio=0.5, name="a"))
    fresh: Any = Keeps(epoch=0, ratio=1.0, name="b")
    _SamplerState([None, fresh]).put(state)
    assert vars(fresh) == {"epoch": 4, "ratio": 0.5, "name": "b"}
    other: Any = Other(epoch=0)
    _SamplerState([None, other]).put(state)
    assert other.epoch == 0, "it is of another class"


def test_generators_alone_are_kept_of_a_librarys_sampler() -> None:
    assert not taken(RandomSampler([1]))
    assert list(taken(RandomSampler([1], generator=torch.Generator()))) == ["1:RandomSampler|generator"]
