"""What the manager needs of a place that keeps parts: a small protocol, and how copies of a part are used.

A disk of the node is such a place (:mod:`checkpointless.local_checkpoint.disk_storage`). Another one is a module
beside it, whose class is given to :class:`~checkpointless.local_checkpoint.LocalCheckpointManager` as ``storage``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PartId, SaveId

logger = logging.getLogger(__name__)

_C = TypeVar("_C")
_T = TypeVar("_T")


class PartError(ValueError):
    """A stored copy of a part was not written to its end, is damaged, or is not what its name says."""


class StoredPart(Protocol):
    """One copy of a part in a storage.

    Its methods raise ``PartError`` if the copy cannot be used, ``FileNotFoundError`` if the copy was deleted in the
    meantime, and ``OSError`` if the copy cannot be read.
    """

    def verify(self) -> None:
        """Read the copy to its end, and compare every digest."""

    def read(self) -> Content:
        """Return the content, on the CPU, after comparing every digest."""


Shelf = Mapping[SaveId, Mapping[int, Sequence[StoredPart]]]


class PartStorage(Protocol):
    """A place that keeps the parts of saves. Several ranks, those of a node for example, may share it.

    A copy that is damaged or cannot be read counts as missing, with a warning.
    """

    def write(self, parts: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
        """Write parts durably: each is whole and survives a loss of power, or is not there at all.

        Args:
            parts: this rank's own part and those of other ranks.
            holder: this rank.
            world_size: the number of ranks of the job, which tells parts of another job apart.

        Raises:
            OSError: a part could not be written; nothing is left of that part.
        """

    def shelf(self, holder: int, world_size: int) -> Shelf:
        """Return the copies that were written to their end, by save and part, whichever rank wrote them.

        Args:
            holder: this rank; the copies that it wrote come first.
            world_size: the number of ranks; parts of a job with another number are left out.

        Raises:
            OSError: the place cannot be read.
        """

    def delete(self, save: SaveId) -> None:
        """Delete everything, also what is unfinished, of one save. A failure is only logged."""

    def delete_all_but(self, keep: Collection[SaveId | None]) -> None:
        """Delete everything, also what is unfinished, of saves not in ``keep``. A failure is only logged."""


def any_sound(copies: Sequence[StoredPart]) -> bool:
    """Return whether one of the copies of a part can be read to its end with every digest right."""

    def sound(copy: StoredPart) -> bool:
        copy.verify()
        return True

    return any(usable(sound, copy) for copy in copies)


def read_any(copies: Sequence[StoredPart]) -> Content | None:
    """Return the content of the first undamaged one among copies of a part; None if there is none."""
    for copy in copies:
        content = usable(lambda copy: copy.read(), copy)
        if content is not None:
            return content
    return None


def usable(reader: Callable[[_C], _T], copy: _C) -> _T | None:
    """Return what ``reader`` makes of a copy, or None, with a warning, if the copy cannot be used."""
    try:
        return reader(copy)
    except FileNotFoundError:
        return None  # another rank of the node has just deleted what no rank needs any more
    except (OSError, PartError) as error:
        logger.warning("a local checkpoint is taken for missing: %s", error)
        return None
