"""A chunk: the piece of a global tensor or object that a leaf of a sharded state stands for, and its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec
import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from checkpointless.serialization.tensor_memory import dtype_name, dtype_of

#: A leaf of a sharded state (Megatron-core's ``dist_checkpointing/mapping.py``).
Leaf: TypeAlias = ShardedTensor | ShardedObject
#: A sharded state, nested dicts and lists with leaves; or what was loaded, with anything in their places.
State: TypeAlias = Any
#: One of Megatron-core's strategies, by what it can do: not all versions have base classes for them.
Strategy: TypeAlias = Any


class Kind(str, Enum):
    """What a chunk is a piece of."""

    TENSOR = "tensor"
    OBJECT = "object"


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One chunk. Replicas of it, on any ranks, have the same fields.

    Attributes:
        kind: whether it belongs to a tensor or an object.
        key: the name of the global tensor or object.
        global_shape: the shape of all of it.
        global_offset: where the chunk begins, by axis.
        local_shape: the shape of the chunk; () for an object.
        flat: first and last element (exclusive) of the flattened chunk that it is restricted to; None: all of it.
        dtype: the dtype without ``torch.``; "" for an object.
    """

    kind: Kind
    key: str
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...] = ()
    flat: tuple[int, int] | None = None
    dtype: str = ""

    @classmethod
    def of(cls, leaf: Leaf) -> Chunk:
        """Return the chunk that a leaf stands for."""
        shape, offset = _numbers(leaf.global_shape), _numbers(leaf.global_offset)
        if isinstance(leaf, ShardedObject):
            return cls(Kind.OBJECT, leaf.key, shape, offset)
        flat = getattr(leaf, "flattened_range", None)  # Megatron-core 0.16 has no such tensors any more
        bounds = None if flat is None else (int(flat.start), int(flat.stop))
        return cls(Kind.TENSOR, leaf.key, shape, offset, _numbers(leaf.local_shape), bounds, dtype_name(leaf.dtype))

    @property
    def id(self) -> str:
        """The name that ranks tell each other: the xxh3-128 of all fields, 32 hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(self))

    @property
    def words(self) -> str:
        """The chunk in words, for messages."""
        return f"{self.kind.value} {self.key} at {list(self.global_offset)}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data of a tensor's chunk."""
        return self.local_shape if self.flat is None else (self.flat[1] - self.flat[0],)

    @property
    def nbytes(self) -> int:
        """The size of a tensor's chunk in bytes; 0 for an object, whose size is not known beforehand."""
        return torch.Size(self.shape).numel() * dtype_of(self.dtype).itemsize if self.kind is Kind.TENSOR else 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the dtype and the shape of the chunk."""
        return dtype_name(tensor.dtype) == self.dtype and tuple(tensor.shape) == self.shape


def leaves_of(state: State) -> list[Leaf]:
    """Return the leaves of a sharded state, nested dicts and lists, in their order."""
    if isinstance(state, Leaf):
        return [state]
    items = state.values() if isinstance(state, Mapping) else state if isinstance(state, list) else ()
    return [leaf for item in items for leaf in leaves_of(item)]


def replaced(state: State, replace: Callable[[Leaf], Any]) -> State:
    """Return a sharded state of the same nesting, with what ``replace`` makes of each leaf in its place."""
    if isinstance(state, Leaf):
        return replace(state)
    if isinstance(state, Mapping):
        return {key: replaced(item, replace) for key, item in state.items()}
    return [replaced(item, replace) for item in state] if isinstance(state, list) else state


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
