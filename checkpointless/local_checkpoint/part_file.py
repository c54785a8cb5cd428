"""One rank's part of a checkpoint as one file: a plain header, the raw bytes of the tensors, and their digests.

The format, all numbers little-endian::

    magic, 8 bytes | length of the header, 8 bytes | header | raw tensors, end to end | digests | seal

The header is a state tree (:mod:`checkpointless.serialization.state_tree`) with the part's name, the world size,
the structure of the state and each tensor's dtype and shape. The digests are one xxh3-64 per tensor. The seal is
the number of digests and the xxh3-64 of everything but the tensors. It is read first, so nothing is parsed that
was not written completely. The digests follow the tensors, so that a part is written in one pass, wherever its
tensors lie.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from checkpointless.serialization import state_tree
from checkpointless.serialization.state_tree import StateTreeError, dtype_name, dtype_of, tensor_bytes

_MAGIC = b"CKPTPRT1"
_NUMBER = struct.Struct("<Q")
_SEAL = struct.Struct("<QQ")
_CHUNK_BYTES = 64 * 1024 * 1024  # how much of a tensor on a GPU is in host memory at a time
_GENERATION = r"iter_(?P<iteration>\d{10,})\.(?P<token>[0-9a-f]{24})"
_PART = _GENERATION + r"\.part_(?P<part>\d+)"
_FILE_NAME = re.compile(rf"(?P<hidden>\.?){_PART}\.held_(?P<holder>\d+)\.ckpt(?P<unfinished>(\.tmp)?)")


class PartFileError(ValueError):
    """A part file was not written to its end, is damaged, or is not what its name says."""


@dataclass(frozen=True, order=True)
class Generation:
    """One save of all ranks. A later save is greater.

    Attributes:
        iteration: the iteration that was saved, at least 0.
        token: 24 hexadecimal digits that all ranks share and no other save has; they order two saves of one
            iteration.
    """

    iteration: int
    token: str

    def __str__(self) -> str:
        return f"iter_{self.iteration:010d}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> Generation:
        """Parse what ``str`` made.

        Raises:
            ValueError: ``text`` does not name a generation.
        """
        found = re.fullmatch(_GENERATION, text)
        if found is None:
            raise ValueError(f"{text!r} is no generation")
        return cls(int(found["iteration"]), found["token"])


@dataclass(frozen=True, order=True)
class PartId:
    """One rank's part of a generation. Its ``str`` is its name everywhere.

    Attributes:
        generation: the save.
        part: the rank whose state it is.
    """

    generation: Generation
    part: int

    def __str__(self) -> str:
        return f"{self.generation}.part_{self.part}"

    @property
    def words(self) -> str:
        """The part in words, for messages."""
        return f"part {self.part} of iteration {self.generation.iteration}"

    @classmethod
    def parse(cls, text: str) -> PartId:
        """Parse what ``str`` made.

        Raises:
            ValueError: ``text`` does not name a part.
        """
        found = re.fullmatch(_PART, text)
        if found is None:
            raise ValueError(f"{text!r} names no part of a local checkpoint")
        return cls(Generation(int(found["iteration"]), found["token"]), int(found["part"]))


@dataclass(frozen=True)
class PartName:
    """What the name of a file in the checkpoint directory says.

    Attributes:
        id: the part.
        holder: the rank that wrote the file.
        finished: False if the file is still being written, or was when its writer ended.
    """

    id: PartId
    holder: int
    finished: bool

    @property
    def file(self) -> str:
        """The name of the file."""
        name = f"{self.id}.held_{self.holder}.ckpt"
        return name if self.finished else f".{name}.tmp"

    @classmethod
    def parse(cls, file: str) -> PartName | None:
        """Parse the name ``file``; return None if it is not the name of a part file."""
        found = _FILE_NAME.fullmatch(file)
        if found is None or bool(found["hidden"]) != bool(found["unfinished"]):
            return None
        id_ = PartId(Generation(int(found["iteration"]), found["token"]), int(found["part"]))
        return cls(id_, int(found["holder"]), finished=not found["unfinished"])


# --- a state as its structure and its tensors ---------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """A nested state, separated into structure and tensors.

    Attributes:
        structure: the encoding of everything but the tensors.
        tensors: the tensors, in the order in which the structure refers to them.
    """

    structure: bytes
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, state: Any) -> Content:
        """Take ``state`` apart; its tensors are referenced, not copied.

        Raises:
            StateTreeError: something in it cannot be stored safely; the message says where it is.
        """
        tensors: list[torch.Tensor] = []
        skeleton = _without_tensors(state, "state", tensors)
        return cls(state_tree.dumps(skeleton), tuple(tensors))

    def state(self) -> Any:
        """Return the state, put together again.

        Raises:
            ValueError: structure and tensors do not belong together.
        """
        return _with_tensors(state_tree.loads(self.structure), self.tensors)

    def on_host(self, copy: bool = False) -> Content:
        """Return this content in host memory.

        Args:
            copy: share nothing with the original, not even tensors that lie in host memory already.
        """
        return Content(self.structure, tuple(tensor.to("cpu", copy=copy) for tensor in self.tensors))


def _without_tensors(value: Any, path: str, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` with a reference in the place of each tensor.

    A reference is a tuple that ends in "tensor". To tell them apart, "tuple" is appended to each of the user's
    tuples. (The marks are at the end, so that the state tree's messages count the items as the user does.)
    """
    if isinstance(value, torch.Tensor):
        tensors.append(_storable(value, path))
        return len(tensors) - 1, "tensor"
    if isinstance(value, dict):
        return {key: _without_tensors(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
    if isinstance(value, tuple):
        return *(_without_tensors(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)), "tuple"
    if type(value) is list:
        return [_without_tensors(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Put together what :func:`_without_tensors` took apart."""
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    if not isinstance(value, tuple):
        return value
    if value[-1:] == ("tuple",):
        return tuple(_with_tensors(item, tensors) for item in value[:-1])
    if len(value) != 2 or value[1] != "tensor" or not 0 <= value[0] < len(tensors):
        raise ValueError("the structure of a state refers to a tensor that is not there")
    return tensors[value[0]]


def _storable(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return ``tensor`` without its autograd history, if it is nothing more than strided memory."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise StateTreeError(f"{path} is a {kind.__module__}.{kind.__qualname__}: give its local, plain tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise StateTreeError(f"{path} is a tensor without plain memory ({tensor.layout}, {tensor.device})")
    return tensor.detach().resolve_conj().resolve_neg()


# --- in and out of a file -----------------------------------------------------------------------------------------


def write_part(folder: Path, name: PartName, world_size: int, content: Content) -> Path:
    """Write a part. The file gets its name only when it is whole and on the disk.

    Args:
        folder: the checkpoint directory.
        name: the part and its holder.
        world_size: the number of ranks of the job, which tells parts of another job apart.
        content: the state.

    Returns:
        The path of the file.

    Raises:
        OSError: the part could not be written; no unfinished file is left.
    """
    path = folder / name.file
    unfinished = folder / PartName(name.id, name.holder, finished=False).file
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            _write(file, name.id, world_size, content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return path


def part_world_size(path: Path) -> int:
    """Return the world size in the header of a part file, and check its length and seal, but not its tensors.

    Raises:
        PartFileError: the file is cut off or damaged, or is not the part that its name says.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return _open_part(file, path).world_size


def verify_part(path: Path) -> None:
    """Read a part file to its end and compare every digest. This takes as much memory as the largest tensor.

    Raises:
        PartFileError: the file or a tensor is cut off or damaged, or the file is not the part that its name says.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        for _ in _tensors(file, _open_part(file, path), path):
            pass


def read_part(path: Path) -> Content:
    """Return the content of a part file, on the CPU, after comparing every digest.

    Raises:
        PartFileError: the file or a tensor is cut off or damaged, or the file is not the part that its name says.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        opened = _open_part(file, path)
        return Content(opened.structure, tuple(_tensors(file, opened, path)))


@dataclass(frozen=True)
class _Opened:
    """The sealed header and digests of a part file that is positioned at its first tensor."""

    world_size: int
    structure: bytes
    entries: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    digests: tuple[int, ...]


def _write(file: BinaryIO, part: PartId, world_size: int, content: Content) -> None:
    header = state_tree.dumps(
        {
            "id": str(part),
            "world_size": world_size,
            "structure": content.structure,
            "tensors": [[dtype_name(tensor.dtype), list(tensor.shape)] for tensor in content.tensors],
        }
    )
    preface = _MAGIC + _NUMBER.pack(len(header)) + header
    file.write(preface)
    digests = b"".join(_NUMBER.pack(_write_tensor(file, tensor)) for tensor in content.tensors)
    file.write(digests + _SEAL.pack(len(content.tensors), xxhash.xxh3_64_intdigest(preface + digests)))


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> int:
    """Write the bytes of ``tensor`` and return their digest."""
    flat = tensor_bytes(tensor)
    digest = xxhash.xxh3_64()
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        chunk = flat[start : start + _CHUNK_BYTES].cpu().numpy().data
        digest.update(chunk)
        file.write(chunk)
    return digest.intdigest()


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_part(file: BinaryIO, path: Path) -> _Opened:
    """Check everything but the tensors, and leave ``file`` positioned at the first tensor."""
    size = os.fstat(file.fileno()).st_size
    begin = len(_MAGIC) + _NUMBER.size
    if size < begin + _SEAL.size:
        raise PartFileError(f"{path} is cut off: it has {size} bytes")
    file.seek(size - _SEAL.size)
    count, seal = _SEAL.unpack(file.read(_SEAL.size))
    file.seek(0)
    preface = file.read(begin)
    (length,) = _NUMBER.unpack_from(preface, len(_MAGIC))
    body = size - begin - length - count * _NUMBER.size - _SEAL.size
    if not preface.startswith(_MAGIC) or body < 0:
        raise PartFileError(f"{path} is cut off or no part of a local checkpoint")
    preface += file.read(length)
    file.seek(begin + length + body)
    digests = file.read(count * _NUMBER.size)
    if xxhash.xxh3_64_intdigest(preface + digests) != seal:
        raise PartFileError(f"{path} is cut off or damaged: its seal is broken")
    file.seek(begin + length)
    opened = _parse(preface[begin:], digests, path)
    if body != sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in opened.entries):
        raise PartFileError(f"{path} is damaged: its tensors take other than {body} bytes")
    return opened


def _parse(header: bytes, digests: bytes, path: Path) -> _Opened:
    """Parse a sealed header, and check it against the file's name and its digests."""
    try:
        fields = state_tree.loads(header)
        part, structure = PartId.parse(fields["id"]), fields["structure"]
        entries = tuple((dtype_of(dtype), tuple(shape)) for dtype, shape in fields["tensors"])
        world_size = int(fields["world_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise PartFileError(f"{path} has a header that cannot be read: {error}") from error
    name = PartName.parse(path.name)
    if name is None or name.id != part:
        raise PartFileError(f"{path} is {part.words} ({part}) by its header, and not what its name says")
    values = tuple(value for (value,) in _NUMBER.iter_unpack(digests))
    if len(values) != len(entries):
        raise PartFileError(f"{path} has {len(entries)} tensors and {len(values)} digests")
    return _Opened(world_size, structure, entries, values)


def _tensors(file: BinaryIO, opened: _Opened, path: Path) -> Iterator[torch.Tensor]:
    """Yield the tensors of a file that is positioned at its first tensor, and compare their digests."""
    for index, ((dtype, shape), digest) in enumerate(zip(opened.entries, opened.digests)):
        tensor = torch.empty(shape, dtype=dtype)
        memory = tensor_bytes(tensor).numpy().data
        if file.readinto(memory) != memory.nbytes:  # type: ignore[attr-defined]
            raise PartFileError(f"{path} is cut off in tensor {index}")
        if xxhash.xxh3_64_intdigest(memory) != digest:
            raise PartFileError(f"{path} is damaged: tensor {index} has another digest")
        yield tensor
