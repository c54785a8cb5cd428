"""Bytes of any origin give plain data or a ValueError; nothing is imported or unpickled."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.serialization import state_tree


@given(st.binary())
def test_any_bytes_give_plain_data_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        state_tree.loads(data)


@given(st.binary(min_size=1), st.integers(1, 30))
def test_what_is_cut_off_is_a_value_error(blob: bytes, missing: int) -> None:
    data = state_tree.dumps([blob, {"a": (1, 2)}])
    with pytest.raises(ValueError):
        state_tree.loads(data[: max(0, len(data) - missing)])
    with pytest.raises(ValueError, match="bytes that it does not refer to"):
        state_tree.loads(data + b"x")


KINDS = ("tensor", "array", "registered", "same", "numpy", "ordered", "deque", "size", "dict", "set", "range")
nodes = st.recursive(
    st.none() | st.integers(-2, 9) | st.sampled_from(["float32", "<f4", "|O8", "builtins.print", "cuda", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"t": st.sampled_from(KINDS)},
            optional=dict.fromkeys(
                ("v", "at", "dtype", "shape", "of", "order", "metadata", "max", "device"), inner
            ),
        )
    ),
    max_leaves=12,
)


@given(nodes)
def test_a_forged_header_gives_plain_data_or_a_value_error(node: Any) -> None:
    header = json.dumps(node).encode()
    with contextlib.suppress(ValueError):
        state_tree.loads(struct.pack("<I", len(header)) + header)


def test_what_is_not_registered_here_is_not_imported() -> None:
    header = json.dumps({"t": "registered", "of": "collections.Counter", "v": ["a"]}).encode()
    with pytest.raises(ValueError, match=r"collections\.Counter is not registered on this rank"):
        state_tree.loads(struct.pack("<I", len(header)) + header)


def test_nothing_is_unpickled() -> None:
    with pytest.raises(ValueError):
        state_tree.loads(b"\x80\x04\x95")
    for name in ("Decimal", "builtins.eval"):
        header = json.dumps({"t": name, "v": "1"}).encode()
        with pytest.raises(ValueError, match="unknown kind"):
            state_tree.loads(struct.pack("<I", len(header)) + header)
