"""One rank's part of a checkpoint as one file: a plain header, the raw bytes of the tensors, and their digests.

The format, all numbers little-endian::

    magic, 8 bytes | length of the header, 8 bytes | header | raw tensors, end to end | digests | seal

The header is a state tree (:mod:`checkpointless.serialization.state_tree`) with the part's name, the world size,
the form and the structure of the state and each tensor's dtype and shape. The digests are one xxh3-64 per tensor.
The seal is the number of digests and the xxh3-64 of everything but the tensors. It is read first, so nothing is
parsed that was not written completely. The digests follow the tensors, so that a part is written in one pass,
wherever its tensors lie.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import torch
import xxhash

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PART, PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartError
from checkpointless.serialization import state_tree
from checkpointless.serialization.tensor_memory import dtype_name, dtype_of, tensor_bytes

_MAGIC = b"CKPTPRT1"
_NUMBER = struct.Struct("<Q")
_SEAL = struct.Struct("<QQ")
_CHUNK_BYTES = 64 * 1024 * 1024  # how much of a tensor on a GPU is in host memory at a time
_FILE_NAME = re.compile(rf"(?P<hidden>\.?){PART}\.held_(?P<holder>\d+)\.ckpt(?P<unfinished>(\.tmp)?)")


class PartFileError(PartError):
    """A part file was not written to its end, is damaged, or is not what its name says."""


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
        id_ = PartId(SaveId(int(found["iteration"]), found["token"]), int(found["part"]))
        return cls(id_, int(found["holder"]), finished=not found["unfinished"])


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
        return Content(opened.structure, tuple(_tensors(file, opened, path)), opened.form)


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """The header, as it is written; each tensor is its dtype and shape."""

    id: str
    world_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    form: str
    structure: bytes
    tensors: list[tuple[str, list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]]]


@dataclass(frozen=True)
class _Opened:
    """The sealed header and digests of a part file that is positioned at its first tensor."""

    world_size: int
    form: str
    structure: bytes
    entries: tuple[tuple[torch.dtype, list[int]], ...]
    nbytes: int  # of all tensors
    digests: tuple[int, ...]


def _write(file: BinaryIO, part: PartId, world_size: int, content: Content) -> None:
    shapes = [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in content.tensors]
    fields = _Header(str(part), world_size, content.form, content.structure, shapes)
    header = state_tree.dumps(msgspec.structs.asdict(fields))
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
        raise PartFileError(f"{path} is truncated: it has {size} bytes")
    file.seek(size - _SEAL.size)
    count, seal = _SEAL.unpack(file.read(_SEAL.size))
    file.seek(0)
    preface = file.read(begin)
    (length,) = _NUMBER.unpack_from(preface, len(_MAGIC))
    body = size - begin - length - count * _NUMBER.size - _SEAL.size
    if not preface.startswith(_MAGIC) or body < 0:
        raise PartFileError(f"{path} is truncated, or not part of a local checkpoint")
    preface += file.read(length)
    file.seek(begin + length + body)
    digests = file.read(count * _NUMBER.size)
    if xxhash.xxh3_64_intdigest(preface + digests) != seal:
        raise PartFileError(f"{path} is truncated or damaged: its seal is broken")
    file.seek(begin + length)
    opened = _parse(preface[begin:], digests, path)
    if body != opened.nbytes:
        raise PartFileError(f"{path} is damaged: its tensors take other than {body} bytes")
    return opened


def _parse(header: bytes, digests: bytes, path: Path) -> _Opened:
    """Parse a sealed header, and check it against the file's name and its digests."""
    try:
        fields = msgspec.convert(state_tree.loads(header), _Header, builtin_types=(bytes,))
        part = PartId.parse(fields.id)
        entries = tuple((dtype_of(dtype), shape) for dtype, shape in fields.tensors)
        nbytes = sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for dtype, shape in entries)
    except (ValueError, RuntimeError, msgspec.ValidationError) as error:  # RuntimeError: no such shape
        raise PartFileError(f"{path} has a header that cannot be read: {error}") from error
    name = PartName.parse(path.name)
    if name is None or name.id != part:
        raise PartFileError(f"{path} is {part.words} ({part}) by its header, and not what its name says")
    values = tuple(value for (value,) in _NUMBER.iter_unpack(digests))
    if len(values) != len(entries):
        raise PartFileError(f"{path} has {len(entries)} tensors and {len(values)} digests")
    return _Opened(fields.world_size, fields.form, fields.structure, entries, nbytes, values)


def _tensors(file: BinaryIO, opened: _Opened, path: Path) -> Iterator[torch.Tensor]:
    """Yield the tensors of a file that is positioned at its first tensor, and compare their digests."""
    for index, ((dtype, shape), digest) in enumerate(zip(opened.entries, opened.digests)):
        tensor = torch.empty(shape, dtype=dtype)
        memory = tensor_bytes(tensor).numpy().data
        if file.readinto(memory) != memory.nbytes:  # type: ignore[attr-defined]
            raise PartFileError(f"{path} is truncated in tensor {index}")
        if xxhash.xxh3_64_intdigest(memory) != digest:
            raise PartFileError(f"{path} is damaged: tensor {index} has another digest")
        yield tensor
