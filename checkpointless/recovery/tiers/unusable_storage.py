"""A place that was there when the job began, and cannot be used by this process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import Shelf


class UnusableStorage:
    """Has nothing and keeps nothing. It is a :class:`~checkpointless.local_checkpoint.part_storage.PartStorage`.

    Args:
        problem: why the place cannot be used.
    """

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def write(self, parts: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
        """Raise ``OSError``."""
        raise OSError(self._problem)

    def shelf(self, holder: int, world_size: int) -> Shelf:
        """Return nothing."""
        return {}

    def delete(self, save: SaveId) -> None:
        """Do nothing."""

    def delete_all_but(self, keep: Collection[SaveId | None]) -> None:
        """Do nothing."""
