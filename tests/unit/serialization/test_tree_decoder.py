"""Bytes of any origin give plain data or a ValueError; nothing is imported or unpickled."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization import state_tree


@given(st.binary())
def test_any_bytes_give_plain_data_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        state_tree.loads(data)


@given(st.binary(min_size=1), st.integers(1, 30))
def test_what_is_cut_off_is_a_value_error(blob: bytes, missing: int) -> None:
    data = state_tree.dumps([blob, {"a": (1, 2)}])
    with pytest.raises(ValueError, match=r"a state tree cannot be read: .* truncated"):
        state_tree.loads(data[: max(0, len(data) - missing)])
    with pytest.raises(ValueError, match=r"a state tree cannot be read: .* trailing"):
        state_tree.loads(data + b"x")


NAMES = (
    *("tensor", "array", "registered", "same", "scalar", "bytearray", "bytes_", "str_", "int", "str", "Fraction"),
    *("OrderedDict", "Counter", "defaultdict", "deque", "Size", "dict", "set", "frozenset", "tuple", "range"),
    *("slice", "complex", "datetime", "timedelta", "Decimal", "Path", "dtype", "device"),
)
parts = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.binary(max_size=9)
    | st.sampled_from(["float32", "<f4", "|O8", "builtins.print", "cpu", "cuda", "list", "0xf", "1e999999999", "x"])
)
tensors = st.tuples(
    st.sampled_from(["float32", "<f4", "|O8"]),
    st.sampled_from(["cpu", "cuda", "meta"]) | st.lists(st.integers(-1, 3)),
    st.lists(st.integers(-1, 3)) | st.booleans(),
    st.none() | st.lists(st.integers(-1, 3)) | st.binary(max_size=9),
    st.booleans(),
    st.booleans(),
    st.binary(max_size=9) | st.integers(-2, 2),
)
nodes = st.recursive(
    parts | st.dictionaries(st.sampled_from(["tensor", "array"]), tensors, min_size=1, max_size=1),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), st.lists(inner, max_size=3) | parts, min_size=1, max_size=1)
        | st.dictionaries(parts, inner, max_size=2)
    ),
    max_leaves=12,
)


@given(nodes)
def test_a_forged_tree_gives_plain_data_or_a_value_error(node: Any) -> None:
    with contextlib.suppress(ValueError):
        state_tree.loads(msgspec.msgpack.encode(node))


@pytest.mark.parametrize(
    "node",
    [
        {"bytearray": [1 << 50]},
        {"bytes_": [1 << 50]},
        {"Fraction": ["1e1000000000"]},
        {"Fraction": ["1e1000000000", 1]},
        {"Size": ["x"]},
        {"tensor": ["float32", "cpu", [1 << 40], None, False, False, b""]},
        {"tensor": ["float32", "cpu", [1 << 40, 0], [0, 0], False, False, b""]},
        {"array": ["|O8", [1], False, b"12345678"]},
        {"scalar": ["|O8", b"12345678"]},
        {"dict": [1]},
        {"dict": [1, 2], "set": []},
        {},
        msgspec.msgpack.Ext(5, b"x"),
        {"same": 0},
    ],
)
def test_a_forged_value_is_refused_and_takes_no_memory(node: Any) -> None:
    with pytest.raises(ValueError):
        state_tree.loads(msgspec.msgpack.encode(node))


def test_what_is_not_registered_here_is_not_imported() -> None:
    with pytest.raises(ValueError, match=r"collections\.Counter is not registered on this rank"):
        state_tree.loads(msgspec.msgpack.encode({"registered": ["collections.Counter", ["a"]]}))


def test_nothing_is_unpickled() -> None:
    with pytest.raises(ValueError):
        state_tree.loads(b"\x80\x04\x95")
    for name in ("decimal.Decimal", "builtins.eval"):
        with pytest.raises(ValueError, match=f"unknown type '{name}'"):
            state_tree.loads(msgspec.msgpack.encode({name: ["1"]}))
