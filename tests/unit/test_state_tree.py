"""Plain data travels as it is; anything else is refused with its path."""

from __future__ import annotations

import datetime
import enum
import math
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.recovery import state_tree
from checkpointless.recovery.state_tree import StateTreeError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(trees)
def test_round_trip(tree: Any) -> None:
    back = state_tree.loads(state_tree.dumps(tree))
    assert back == tree
    assert repr(back) == repr(tree)


def test_keys_and_empty_mappings_survive() -> None:
    tree = {1: {}, "1": [], "a.b": (1, (2,)), (0, "x"): {"t": "dict"}, "set": {3, 4}}
    assert state_tree.loads(state_tree.dumps(tree)) == tree


def test_not_a_number_and_infinities() -> None:
    back = state_tree.loads(state_tree.dumps([math.nan, math.inf, -math.inf, 0.1]))
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf, 0.1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    back = state_tree.loads(state_tree.dumps(tensor))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.float(), tensor.float())


def test_other_plain_objects() -> None:
    tree = [PurePosixPath("/a/b"), datetime.timedelta(seconds=1.5), datetime.datetime(2020, 1, 2, 3, 4, 5)]
    assert state_tree.loads(state_tree.dumps(tree)) == tree
    assert state_tree.loads(state_tree.dumps(np.float32(0.5))) == 0.5


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize("intruder", [object(), lambda: None, Colour.RED, torch.nn.Linear(1, 1)])
def test_what_cannot_travel_is_refused_with_its_path(intruder: Any) -> None:
    with pytest.raises(StateTreeError, match=r"state\['callbacks'\]\['EMA'\]\[1\]"):
        state_tree.dumps({"callbacks": {"EMA": [0, intruder]}})


def test_nothing_is_unpickled() -> None:
    with pytest.raises(ValueError):
        state_tree.loads(b"\x80\x04\x95")
