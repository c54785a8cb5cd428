"""What a rank writes to a checkpoint, as the content of a part that a place can keep; and back."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from checkpointless.replication.parts import Content, PartError, SaveId
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.state.serialization.tensor_memory import dtype_name, dtype_of

_PLAIN = "plain"
_STREAM = "stream"  # TransformerEngine's extra state, which only it reads


def values_to_keep(leaves: Sequence[Leaf]) -> list[tuple[Leaf, Tree]]:
    """Return the leaves that can be kept, each with its tensor or its object as :func:`encoded` made it.

    A tensor of a special class (one in FP8), and an object that is not made of plain values, are left out: they
    will be loaded from storage.

    Args:
        leaves: what this rank writes, with its data.
    """
    kept = []
    for leaf in leaves:
        value = encoded(leaf.data) if not isinstance(leaf.data, torch.Tensor) else leaf.data
        if value is not None and (not isinstance(value, torch.Tensor) or can_keep(value)):
            kept.append((leaf, value))
    return kept


def content_of(identity: Identity, kept: Sequence[tuple[Leaf, Tree]]) -> Content:
    """Return a part, whose tensors are referenced and not copied.

    Args:
        identity: of the checkpoint.
        kept: what :func:`values_to_keep` returned.
    """
    about = msgspec.msgpack.encode((identity, [Chunk.of(leaf) for leaf, _ in kept]))
    return Content.of({"about": about, "values": [value for _, value in kept]})


def values_of(content: Content, identity: Identity) -> dict[str, Tree]:
    """Return what a part has, by the ids of the chunks: tensors, and objects as :func:`encoded` made them.

    Raises:
        PartError: the part is of another checkpoint, or is no such part.
    """
    try:
        state = content.state()
        theirs, chunks = msgspec.msgpack.decode(state["about"], type=tuple[Identity, list[Chunk]])
        values = dict(zip([each.id for each in chunks], state["values"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise PartError(f"a part of {identity.save} is no part of a torch_dist checkpoint: {error}") from error
    if theirs != identity:
        raise PartError(f"a part is of the checkpoint {theirs.name} ({theirs.save}), not of {identity.name}")
    for chunk in chunks:
        if chunk.kind is Kind.TENSOR and not chunk.fits(values[chunk.id]):
            raise PartError(f"{chunk.words} is not what a part of {identity.save} says")
    return values


def can_keep(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory, which can be copied bit by bit."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def encoded(value: object) -> Tree | None:
    """Return an object as plain values that can be kept and sent; None if it is not made of plain values.

    Tensors in it are copied into host memory.
    """
    if type(value) is io.BytesIO:
        return {_STREAM: value.getvalue(), "at": value.tell()}
    try:
        return Content.of({_PLAIN: value}).on_host(copy=True).state()
    except (TypeError, ValueError):  # StateTreeError is one of them
        return None


def decoded(tree: Mapping[str, Tree]) -> Tree:
    """Return the object that :func:`encoded` encoded, which shares no memory with it.

    Raises:
        ValueError: it is no such encoding.
    """
    if _STREAM in tree:
        stream = io.BytesIO(tree[_STREAM])
        stream.seek(tree["at"])
        return stream
    if _PLAIN not in tree:
        raise ValueError("an object was not encoded as it should be")
    return Content.of(tree[_PLAIN]).on_host(copy=True).state()


# --- chunks: the pieces of global tensors and objects that leaves of a sharded state stand for --------------------


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
        """The name that ranks send each other: the xxh3-128 of all fields, 32 hexadecimal digits."""
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


# --- the identity of a checkpoint ---------------------------------------------------------------------------------
#
# A small file lies next to Megatron's own. It names the save and the directory, and holds size and time of
# Megatron's ``.metadata``. If anybody writes another checkpoint into the directory, or moves it, the file says
# nothing any more, and everything comes from storage.


logger = logging.getLogger(__name__)

FILE = "checkpointless.json"
_METADATA = ".metadata"  # what torch writes last of the chunks
_VERSION = 1


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The save that a checkpoint is the result of.

    Attributes:
        token: the name of the save.
        name: the names of the checkpoint's directory and of the one around it.
        world_size: how many ranks saved.
    """

    token: str
    name: str
    world_size: int

    @property
    def save(self) -> SaveId:
        """The save."""
        return SaveId.parse(self.token)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says: the identity, and size and time of ``.metadata``."""

    version: int
    identity: Identity
    metadata: list[int]


def name_of(checkpoint_dir: str | os.PathLike[str]) -> str:
    """Return the name of a checkpoint: its directory (which may be ``weights``) and the one around it."""
    return "/".join(Path(os.path.abspath(checkpoint_dir)).parts[-2:])


def is_local(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the directory is one of the file system, and no address of a remote store."""
    return "://" not in str(checkpoint_dir)


def write_identity(identity: Identity, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the identity of a checkpoint whose ``.metadata`` is written.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(checkpoint_dir)
    unfinished = folder / f".{FILE}.tmp"
    unfinished.write_bytes(msgspec.json.encode(_File(_VERSION, identity, _stamp(folder))))
    os.replace(unfinished, folder / FILE)


def read_identity(checkpoint_dir: str | os.PathLike[str]) -> Identity | None:
    """Return the identity of a checkpoint; None if it has none that holds, with a warning if it had one."""
    folder = Path(checkpoint_dir)
    if not is_local(checkpoint_dir):
        return None
    try:
        about = msgspec.json.decode((folder / FILE).read_bytes(), type=_File)
        if about.version != _VERSION:
            raise ValueError(f"it is of version {about.version}")
        if about.metadata != _stamp(folder) or about.identity.name != name_of(folder):
            raise ValueError("it is of another checkpoint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        logger.warning("%s is not used, and no copies are: %s", folder / FILE, error)
        return None
    return about.identity


def _stamp(folder: Path) -> list[int]:
    about = (folder / _METADATA).stat()
    return [about.st_size, about.st_mtime_ns]
