"""Stores: the places that keep parts. All copies are kept in stores, which :func:`open_store` opens.

A store of one's own is a class with the methods of :class:`PartStore`, and one call of :func:`register_store`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from checkpointless.replication.directory import DirectoryStore
from checkpointless.replication.parts import Part, PartError, PartId, SaveId

logger = logging.getLogger(__name__)

_C = TypeVar("_C")
_T = TypeVar("_T")


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
        return self.part if is_shared else replace(self.part, content=self.part.content.on_host(copy=True))


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
            part = replace(part, content=part.content.on_host(copy=True))
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


def usable(read: Callable[[_C], _T], copy: _C) -> _T | None:
    """Return what ``read`` makes of a copy, or None, with a warning, if the copy cannot be used."""
    try:
        return read(copy)
    except FileNotFoundError:
        return None  # another rank of the node has just deleted what no rank needs any more
    except (OSError, PartError) as error:
        logger.warning("a copy is taken for missing: %s", error)
        return None


def write_parts(store: PartStore, parts: Sequence[Part], holder: int) -> int:
    """Write the parts that can be written, and return their number; a warning says which cannot.

    Nothing that goes wrong is raised: other ranks wait to hear which parts there are. It may run in a process of
    its own.
    """
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
