"""A directory of part files: what it contains and what can be used.

A part is one file, all numbers little-endian::

    magic, 8 bytes | length of the header, 8 bytes | its digest, 8 bytes | header | raw tensors, end to end

The file is written under another name, synced and renamed, so it is whole or absent. Nothing is parsed whose digest
is not right, and nothing in it is evaluated.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from checkpointless.replication.parts import Header, Part, PartError, PartId, SaveId, chunks
from checkpointless.state.serialization.tensor_memory import tensor_bytes

logger = logging.getLogger(__name__)

_MAGIC = b"CKPTPRT2"
_PREFACE = struct.Struct("<8sQQ")
_FILE_NAME = re.compile(
    r"(?P<hidden>\.?)(?P<save>iter_\d{10,}\.[0-9a-f]{24})\.of_(?P<world_size>\d+)\.part_(?P<part>\d+)"
    r"\.held_(?P<holder>\d+)\.ckpt(?P<unfinished>(\.tmp)?)"
)


@dataclass(frozen=True)
class _FileName:
    """What the name of a part file says."""

    id: PartId
    world_size: int
    holder: int

    def __str__(self) -> str:
        return f"{self.id.save}.of_{self.world_size}.part_{self.id.part}.held_{self.holder}.ckpt"

    @property
    def unfinished(self) -> str:
        """The name of the file while it is being written."""
        return f".{self}.tmp"

    @classmethod
    def parse(cls, file: str) -> tuple[_FileName, bool] | None:
        """Return what the name of a file says, and whether the file is finished; None: it is no part file."""
        found = _FILE_NAME.fullmatch(file)
        if found is None or bool(found["hidden"]) != bool(found["unfinished"]):
            return None
        id_ = PartId(SaveId.parse(found["save"]), int(found["part"]))
        return cls(id_, int(found["world_size"]), int(found["holder"])), not found["unfinished"]


@dataclass(frozen=True)
class _PartFile:
    """A copy of a part as a file."""

    path: Path
    name: _FileName

    def read(self, is_shared: bool = False) -> Part:
        """Read the file, and compare every digest.

        Raises:
            PartError: the file is cut off or damaged, or is not the part that its name says.
            OSError: the file cannot be read.
        """
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            preface = file.read(_PREFACE.size)
            if len(preface) < _PREFACE.size or not preface.startswith(_MAGIC):
                raise PartError(f"{self.path} is truncated, or no part file of this version")
            _, length, digest = _PREFACE.unpack(preface)
            data = file.read(length) if length < size else b""
            if len(data) < length or xxhash.xxh3_64_intdigest(data) != digest:
                raise PartError(f"{self.path} is truncated or damaged: its header has another digest")
            try:
                header = Header.parse(data)
                nbytes = sum(tensor.nbytes for tensor in header.empty())
                if size != _PREFACE.size + length + nbytes:
                    raise PartError(f"it has {size} bytes, and not {_PREFACE.size + length + nbytes}")
                part = Part.within(header, [torch.empty_like(each, device="cpu") for each in header.empty()])
                for tensor in part.content.tensors:
                    file.readinto(tensor_bytes(tensor).numpy().data)  # type: ignore[attr-defined]
                part.verify()
            except PartError as error:
                raise PartError(f"{self.path} is truncated or damaged: {error}") from error
        if (part.id, part.world_size) != (self.name.id, self.name.world_size):
            raise PartError(f"{self.path} is {part.id} of {part.world_size} ranks, and not what its name says")
        return part


class DirectoryStore:
    """The part files in one directory, which the ranks of a node share.

    It is a :class:`~checkpointless.replication.store.PartStore`.

    Args:
        root: the directory, which is made if it does not exist, now and at each write: scratch may be purged.

    Raises:
        OSError: the directory cannot be made, or other users can write to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._make()

    def _make(self) -> None:
        """Make the directory, for this user only, if it does not exist."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.root.stat()
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{self.root} can be changed by other users, and checkpoints with it: "
                "give a directory of your own, or chmod 700 it"
            )

    def write(self, part: Part, holder: int) -> None:
        """Write a part. The file gets its name only when it is whole and on the disk.

        Raises:
            OSError: the part could not be written, or the disk has no room for it; nothing is left of it.
        """
        self._make()
        about, needed = os.statvfs(self.root), part.content.nbytes
        if needed > about.f_bavail * about.f_frsize:
            free = about.f_bavail * about.f_frsize
            raise OSError(errno.ENOSPC, f"{needed} bytes are needed and {free} are free", str(self.root))
        name = _FileName(part.id, part.world_size, holder)
        unfinished = self.root / name.unfinished
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(unfinished, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                header = part.header()
                file.write(_PREFACE.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header)) + header)
                for tensor in part.content.tensors:
                    for chunk in chunks(tensor):
                        file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.root / str(name))
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_folder(self.root)

    def delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        """Delete all files, also unfinished ones, of saves. A node's ranks share the work."""
        try:
            for name, _, path in self._files():
                if is_meant(name.id.save):
                    path.unlink(missing_ok=True)
        except OSError as error:  # there may still be room for the next save; if not, its write raises
            logger.warning("an old copy cannot be deleted: %s", error)

    def shelf(self, world_size: int) -> Mapping[SaveId, Mapping[int, Sequence[_PartFile]]]:
        """Return the finished files, by save and part, whichever rank wrote them.

        After a node was replaced, a rank may find its part under another rank's name.

        Raises:
            OSError: the directory cannot be read.
        """
        shelf: dict[SaveId, dict[int, list[_PartFile]]] = defaultdict(lambda: defaultdict(list))
        for name, is_finished, path in self._files():
            if is_finished and name.world_size == world_size:
                shelf[name.id.save][name.id.part].append(_PartFile(path, name))
        return shelf

    def _files(self) -> Iterator[tuple[_FileName, bool, Path]]:
        """Yield all part files in the directory; none if the directory is gone."""
        try:
            paths = sorted(self.root.iterdir())
        except FileNotFoundError:
            return
        for path in paths:
            found = _FileName.parse(path.name)
            if found is not None:
                yield *found, path


def _sync_folder(folder: Path) -> None:
    """Make a new name in ``folder`` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
