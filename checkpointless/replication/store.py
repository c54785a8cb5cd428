"""Stores: the places that keep parts. All copies are kept in stores, which :func:`open_store` opens.

A store of one's own is a class with the methods of :class:`PartStore`, and one call of :func:`register_store`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from checkpointless.replication.parts import Part, PartError, PartId, SaveId

logger = logging.getLogger(__name__)


class StoredPart(Protocol):
    """One copy of a part in a store."""

    def read(self, is_shared: bool = False) -> Part:
        """Return the part, after comparing every digest.

        Args:
            is_shared: the caller changes nothing of it, so that a store in memory need not copy it.

        Raises:
            PartError: the copy cannot be used.
            FileNotFoundError: it was deleted in the meantime.
            OSError: it cannot be read.
        """


Shelf = Mapping[SaveId, Mapping[int, Sequence[StoredPart]]]


class PartStore(Protocol):
    """A place that keeps the parts of saves. Several ranks, those of a node for example, may share it."""

    def write(self, part: Part, holder: int) -> None:
        """Write a part durably: it is whole and survives a loss of power, or is not there at all.

        Args:
            part: a rank's own part or another rank's.
            holder: the rank that writes it.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """

    def shelf(self, world_size: int) -> Shelf:
        """Return the copies that were written to their end, by save and part, whichever rank wrote them.

        Args:
            world_size: the number of ranks; parts of a job with another number are left out.

        Raises:
            OSError: the place cannot be read.
        """

    def delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        """Delete everything, also what is unfinished, of saves. A failure is only logged."""


@dataclass(frozen=True)
class _Kept:
    """A part in memory."""

    part: Part

    def read(self, is_shared: bool = False) -> Part:
        self.part.verify()
        return self.part if is_shared else replace(self.part, content=self.part.content.copy())


class MemoryStore:
    """Keeps parts in the memory of this process, which alone uses it: the quickest place, lost with the process."""

    def __init__(self) -> None:
        self._parts: Mapping[PartId, _Kept] = {}  # replaced, not changed: threads read it
        self._lock = threading.Lock()  # of replacements

    def copy(self) -> MemoryStore:
        """Return a store with the same parts, which what is done to this one does not change."""
        copied = type(self)()
        copied._parts = self._parts
        return copied

    def write(self, part: Part, holder: int) -> None:
        """Keep a part, or a copy of it if it lies in memory of somebody else's."""
        if part.content.memory is None:
            part = replace(part, content=part.content.copy())
        with self._lock:
            self._parts = {**self._parts, part.id: _Kept(part)}

    def shelf(self, world_size: int) -> Shelf:
        """Return all parts, by save and part."""
        shelf: dict[SaveId, dict[int, list[StoredPart]]] = defaultdict(dict)
        for id_, kept in self._parts.items():
            shelf[id_.save][id_.part] = [kept]
        return shelf

    def delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        """Forget saves."""
        with self._lock:
            self._parts = {id_: kept for id_, kept in self._parts.items() if not is_meant(id_.save)}


_FACTORIES: dict[str, Callable[[str], PartStore]] = {}


def register_store(scheme: str, open_: Callable[[str], PartStore]) -> None:
    """Let places whose names begin with ``scheme://`` be opened by a function.

    Such a name can be given wherever a directory can: to tiers, to local checkpoints and to copies of Megatron's
    checkpoints.

    Args:
        scheme: the scheme.
        open_: makes the store of a place from what follows the scheme; it may raise ``OSError``.
    """
    _FACTORIES[scheme] = open_


def open_store(place: str | os.PathLike[str], *folders: str) -> PartStore:
    """Return the store of a place: a directory, or another one whose scheme is registered.

    Args:
        place: the path of the directory, or ``scheme://...``.
        *folders: the names of folders in it.

    Raises:
        OSError: the place cannot be used.
        ValueError: its scheme is not registered.
    """
    scheme, is_named, rest = os.fspath(place).partition("://")
    if not is_named:
        return DirectoryStore(Path(place, *folders))
    if scheme not in _FACTORIES:
        raise ValueError(f"no store is known for {scheme}://: call register_store({scheme!r}, ...) on every rank")
    return _FACTORIES[scheme]("/".join([rest.rstrip("/"), *folders]))


def write_parts(store: PartStore, parts: Sequence[Part], holder: int) -> int:
    """Write the parts that can be; return how many, with warnings: other ranks wait to hear which there are."""
    written = 0
    for part in parts:
        try:
            store.write(part, holder)
            written += 1
        except OSError as error:
            logger.warning("%s cannot be written by rank %d: %s", part.id.words, holder, error)
        except Exception:
            logger.exception("%s cannot be written by rank %d", part.id.words, holder)
    return written


# --- A directory of part files: what it contains and what can be used -------------------------------------------
#
# The file is written under another name, synced and renamed, so it is whole or absent.

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
        with open(self.path, "rb") as file:
            part = Part.read_from(file, os.fstat(file.fileno()).st_size, str(self.path))
        if (part.id, part.world_size) != (self.name.id, self.name.world_size):
            raise PartError(f"{self.path} is {part.id} of {part.world_size} ranks, and not what its name says")
        return part


class DirectoryStore:
    """The part files in one directory, made at each write if it is gone, which the ranks of a node share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._make()

    def _make(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.root.stat()
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{self.root} can be changed by other users, and checkpoints with it: "
                "give a directory of your own, or chmod 700 it"
            )

    def write(self, part: Part, holder: int) -> None:
        """Write a part. The file gets its name only when it is whole and on the disk."""
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
                part.write_to(file)
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
        """Return the finished files, by save and part, whichever rank wrote them: a node may have been replaced."""
        shelf: dict[SaveId, dict[int, list[_PartFile]]] = defaultdict(lambda: defaultdict(list))
        for name, is_finished, path in self._files():
            if is_finished and name.world_size == world_size:
                shelf[name.id.save][name.id.part].append(_PartFile(path, name))
        return shelf

    def _files(self) -> Iterator[tuple[_FileName, bool, Path]]:
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
