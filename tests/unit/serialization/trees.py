"""Draw states of all plain types, and tell whether two of them are the same."""

from __future__ import annotations

import collections
import datetime
import pathlib
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from checkpointless.state.serialization import state_tree

any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)  # it draws lone surrogates, too
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30)
    | st.floats(allow_nan=False)
    | any_text
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.datetimes(timezones=st.just(datetime.timezone.utc))
    | st.timedeltas()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
    | st.sampled_from([torch.float8_e5m2, torch.device("cpu"), torch.Size([2, 3]), pathlib.Path("a/b")])
    | st.sampled_from([pathlib.PurePosixPath("/c"), slice(1, None), np.float32(0.1), np.int8(-3), np.bool_(True)])
    | st.sampled_from([np.datetime64("2020-01-02"), np.str_("é"), np.bytes_(b"a"), np.complex64(1j)])
)
hashable = st.integers() | any_text | st.tuples(st.integers(), any_text) | st.frozensets(st.integers(), max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(lambda items: collections.deque(items, len(items) + 1))
        | st.dictionaries(hashable, inner)
        | st.dictionaries(hashable, inner).map(collections.OrderedDict)
        | st.dictionaries(hashable, inner).map(lambda items: collections.defaultdict(list, items))
        | st.sets(hashable)
        | st.frozensets(hashable)
        | st.dictionaries(hashable, st.integers()).map(collections.Counter)
        | st.binary().map(bytearray)
    ),
    max_leaves=20,
)


def back(tree: Any) -> Any:
    return state_tree.loads(state_tree.dumps(tree))


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal in values and in all types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        names = getattr(one, "default_factory", 0), getattr(other, "default_factory", 0)
        pairs = zip(one.items(), other.items())
        return len(one) == len(other) and names[0] is names[1] and all(same(*pair) for pair in pairs)
    if isinstance(one, collections.deque) and one.maxlen != other.maxlen:
        return False
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Word(str):
    pass


class Loud:
    def __repr__(self) -> str:
        return "two\nlines"
