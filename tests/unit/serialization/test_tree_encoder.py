"""What cannot travel is refused with its path."""

from __future__ import annotations

import collections
import datetime
import enum
import typing
from typing import Any

import numpy as np
import pytest
import torch

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import StateTreeError
from tests.unit.serialization.trees import Loud, Word


def test_a_cycle_is_refused_with_its_path() -> None:
    tree: dict[str, Any] = {"callbacks": {"EMA": []}}
    tree["callbacks"]["EMA"].append(tree)
    with pytest.raises(StateTreeError, match=r"state\['callbacks'\]\['EMA'\]\[0\] is the dict that it is in"):
        state_tree.check(tree)
    copied = state_tree.copy(tree)
    assert copied["callbacks"]["EMA"][0] is copied is not tree


def test_what_is_nested_too_deep_is_refused_and_can_be_copied() -> None:
    tree: Any = 0
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(StateTreeError, match=r"state\[0\]\[0\].* is nested more than 100 deep"):
        state_tree.check(tree)
    assert type(state_tree.copy(tree)) is list
    with pytest.raises(ValueError):
        state_tree.loads(b"\x91" * 100_000)


class Colour(enum.IntEnum):
    RED = 1


class Settings(dict[str, Any]):
    pass


class Pair(typing.NamedTuple):
    left: int
    right: int


class Shape(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "intruder",
    [
        object(),
        lambda: None,
        Loud(),
        Colour.RED,
        Word("a"),
        Settings(),
        Pair(1, 2),
        torch.nn.Linear(1, 1),
        torch.zeros(2).as_subclass(Shape),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).max(0),
        torch.Generator(),
        np.array([object()]),
        np.zeros(2, dtype=[("a", "<f4")]),
        np.ma.masked_array([1, 2], [True, False]),
        np.random.default_rng(),
        collections.defaultdict(lambda: 1),
        slice("a", "b"),
        {torch.zeros(2): 1},
        {Loud(): 1},
        ...,
        int,
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1), "here")),
    ],
    ids=lambda intruder: type(intruder).__name__,
)
def test_what_cannot_travel_is_refused_with_its_path(intruder: Any) -> None:
    for refuse in (state_tree.check, state_tree.dumps, state_tree.split):
        with pytest.raises(StateTreeError, match=r"^state\['callbacks'\]\['EMA'\]\[1\].* (is|has) .*") as caught:
            refuse({"callbacks": {"EMA": [0, intruder]}})
        assert "\n" not in str(caught.value)
    state_tree.copy([intruder])


def test_a_check_reads_no_tensor() -> None:
    state_tree.check([np.broadcast_to(np.zeros(1), (1 << 40,)), np.broadcast_to(np.zeros(1), (1 << 20, 1 << 20)).T])
    state_tree.check(torch.zeros(1).expand(1 << 40))
