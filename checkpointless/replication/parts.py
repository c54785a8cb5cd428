"""Parts: what one rank keeps of a save, as plain bytes and tensors, with its name and its digests.

A part is the same everywhere: in memory, in a file and between two ranks. Its header has all but the tensors, and
the digest of each of them; the header's own digest goes with it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Annotated, Protocol

import msgspec
import torch
import xxhash

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.state.serialization.tensor_memory import dtype_name, dtype_of, tensor_bytes

_SAVE = r"iter_(?P<iteration>\d{10,})\.(?P<token>[0-9a-f]{24})"
_SAVE_NAME = re.compile(_SAVE)
# A part in a file or on a stream, all numbers little-endian::
#
#     magic, 8 bytes | length of the header, 8 bytes | its digest, 8 bytes | header | raw tensors, end to end
#
# Nothing is parsed whose digest is not right, and nothing in it is evaluated.
_MAGIC = b"CKPTPRT3"
_PREFACE = struct.Struct("<8sQQ")
_MOST_OF_A_HEADER = 1 << 32
_CHUNK_BYTES = 64 * 1024 * 1024
_PART_NAME = re.compile(_SAVE + r"\.part_(?P<part>\d+)")


class PartError(ValueError):
    """A copy of a part was not written to its end, is damaged, or is not what its name says."""


# --- names --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class SaveId:
    """Names one save of all ranks by 24 hexadecimal digits that no other has; a later one is greater."""

    iteration: int
    token: str

    def __str__(self) -> str:
        return f"iter_{self.iteration:010d}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> SaveId:
        """Parse what ``str`` made; raise ``ValueError`` if ``text`` names no save."""
        found = _SAVE_NAME.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} names no save")
        return cls(int(found["iteration"]), found["token"])


@dataclass(frozen=True, order=True)
class PartId:
    """One rank's part of a save. Its ``str`` is its name everywhere."""

    save: SaveId
    part: int

    def __str__(self) -> str:
        return f"{self.save}.part_{self.part}"

    @property
    def words(self) -> str:
        """The part in words, for messages."""
        return f"part {self.part} of iteration {self.save.iteration}"

    @classmethod
    def parse(cls, text: str) -> PartId:
        """Parse what ``str`` made; raise ``ValueError`` if ``text`` does not name a part."""
        found = _PART_NAME.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} names no part of a save")
        return cls(SaveId(int(found["iteration"]), found["token"]), int(found["part"]))


# --- contents -----------------------------------------------------------------------------------------------------


class _Memory(Protocol):
    """One piece of host memory, which is used again when nobody holds this object any more."""

    flat: torch.Tensor


@dataclass(frozen=True)
class Content:
    """A state, separated into structure and tensors. They may lie in one piece of memory of their own."""

    structure: bytes
    tensors: tuple[torch.Tensor, ...]
    memory: _Memory | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of structure and tensors."""
        return len(self.structure) + sum(tensor.nbytes for tensor in self.tensors)

    @classmethod
    def of(cls, state: Tree) -> Content:
        """Take a nested state apart, referencing its tensors; ``StateTreeError`` says what cannot be stored."""
        structure, tensors = state_tree.split(state, inline_bytes=-1, taken=_stored)
        return cls(structure, tuple(tensors))

    def state(self, placed: Callable[[torch.Tensor, str], torch.Tensor] = lambda tensor, _: tensor) -> Tree:
        """Return the state; ``placed`` returns a tensor where it belongs, given its kind of device."""
        return state_tree.join(self.structure, self.tensors, placed)

    def copy(self) -> Content:
        """Return a copy in host memory, which shares nothing with this content."""
        return Content(self.structure, tuple(tensor.to("cpu", copy=True) for tensor in self.tensors))


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without autograd history; for a parameter in FP8 its values, as in Megatron's saves."""
    return (tensor.dequantize() if hasattr(tensor, "_quantizer") else tensor).detach()


# --- parts --------------------------------------------------------------------------------------------------------


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """Everything of a part but its tensors."""

    id: str
    world_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    structure: bytes
    tensors: list[tuple[str, list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]], int]]

    def empty(self) -> Sequence[torch.Tensor]:
        return [torch.empty(shape, dtype=dtype_of(dtype), device="meta") for dtype, shape, _ in self.tensors]

    @classmethod
    def parse(cls, data: bytes) -> _Header:
        try:
            header = msgspec.msgpack.decode(data, type=cls)
            PartId.parse(header.id)
            header.empty()
        except (ValueError, RuntimeError, OverflowError, msgspec.MsgspecError) as error:  # the second: no shape
            raise PartError(f"the header of a part cannot be read: {error}") from error
        return header


@dataclass(frozen=True)
class Part:
    """A part, which nobody changes any more."""

    id: PartId
    world_size: int
    content: Content
    digests: tuple[int, ...]

    @classmethod
    def sealed(cls, id: PartId, world_size: int, content: Content) -> Part:
        """Return the part of a content, which nobody changes any more, and compute the digests."""
        return cls(id, world_size, content, tuple(map(_digest, content.tensors)))

    @classmethod
    def described(cls, data: bytes, room: Callable[[bytes, Sequence[torch.Tensor]], Content]) -> Part:
        """Return the part of a header, to fill in the content of ``room``; raise ``PartError`` if it is none."""
        header = _Header.parse(data)
        content = room(header.structure, header.empty())
        return cls(PartId.parse(header.id), header.world_size, content, tuple(each for *_, each in header.tensors))

    def header(self) -> bytes:
        shapes = [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in self.content.tensors]
        tensors = [(*shape, each) for shape, each in zip(shapes, self.digests, strict=True)]
        return msgspec.msgpack.encode(_Header(str(self.id), self.world_size, self.content.structure, tensors))

    def write_to(self, file: BufferedIOBase) -> None:
        """Write a part as part files have it."""
        header = self.header()
        file.write(_PREFACE.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header)) + header)
        for tensor in self.content.tensors:
            for chunk in chunks(tensor):
                file.write(chunk)

    @classmethod
    def read_from(cls, file: BufferedIOBase, size: int | None, name: str) -> Part:
        """Return the part that :meth:`write_to` wrote (of ``size`` bytes, as far as known) after comparing every
        digest; raise ``PartError`` with ``name`` if it is damaged.
        """
        preface = file.read(_PREFACE.size)
        if len(preface) < _PREFACE.size or not preface.startswith(_MAGIC):
            raise PartError(f"{name} is truncated, or no part file of this version")
        _, length, digest = _PREFACE.unpack(preface)
        data = file.read(length) if length < (size or _MOST_OF_A_HEADER) else b""
        if len(data) < length or xxhash.xxh3_64_intdigest(data) != digest:
            raise PartError(f"{name} is truncated or damaged: its header has another digest")

        def room(structure: bytes, tensors: Sequence[torch.Tensor]) -> Content:
            expected = _PREFACE.size + length + sum(tensor.nbytes for tensor in tensors)
            if size not in (None, expected):
                raise PartError(f"it has {size} bytes, and not {expected}")
            return Content(structure, tuple(torch.empty_like(each, device="cpu") for each in tensors))

        try:
            part = cls.described(data, room)
            for tensor in part.content.tensors:
                file.readinto(tensor_bytes(tensor).numpy().data)
            part.verify()
        except PartError as error:
            raise PartError(f"{name} is truncated or damaged: {error}") from error
        return part

    def verify(self) -> None:
        """Compare every digest; raise ``PartError`` if a tensor is damaged."""
        for index, (tensor, expected) in enumerate(zip(self.content.tensors, self.digests, strict=True)):
            if _digest(tensor) != expected:
                raise PartError(f"{self.id.words} is damaged: tensor {index} has another digest")


def _digest(tensor: torch.Tensor) -> int:
    found = xxhash.xxh3_64()
    for chunk in chunks(tensor):
        found.update(chunk)
    return found.intdigest()


def chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor; of one on a GPU, little is in host memory at a time."""
    flat = tensor_bytes(tensor)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].cpu().numpy().data
