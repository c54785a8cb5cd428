"""Directories: on a disk of the node, with copies on other nodes; or on a storage that all nodes share."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from checkpointless.local_checkpoint.disk_storage import DiskStorage
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.recovery.tiers.tier import Tier


class LocalDirectory(Tier):
    """Keeps copies in a directory of the node, which outlives processes, and in those of other nodes.

    Args:
        path: the directory. The tier uses a folder of the job in it.
        every: a copy is made after each step that is a multiple of this number.
        copies: how many other ranks keep a copy of each rank's state. 0: a node that is lost loses them.
        jump: how many ranks these are apart; 0: as many as a node has ranks, or 1 if there is only one node.

    Raises:
        ValueError: a number is out of range.
    """

    name: ClassVar[str] = "local directory"
    cost: ClassVar[int] = 20

    def __init__(self, path: str | os.PathLike[str], every: int = 100, copies: int = 1, jump: int = 0) -> None:
        super().__init__(every, copies, jump)
        self.path = Path(path)

    @override
    def clear(self, storage: PartStorage) -> None:
        """Remove the copies and, with the last of them, the job's folder."""
        super().clear(storage)
        if isinstance(storage, DiskStorage):
            _remove_if_empty(storage.root)

    @override
    def open(self, job: str, rank: int) -> PartStorage:
        """Return the part files of the node in the job's folder.

        Raises:
            OSError: the folder cannot be made, or other users can write to it.
        """
        return DiskStorage(self.path / f"job-{job}")


class SharedDirectory(Tier):
    """Keeps copies in a directory that all nodes share, a folder for each rank.

    Args:
        path: the directory. The tier uses a folder of the job in it.
        every: a copy is made after each step that is a multiple of this number.

    Raises:
        ValueError: a number is out of range.
    """

    name: ClassVar[str] = "shared directory"
    cost: ClassVar[int] = 30

    def __init__(self, path: str | os.PathLike[str], every: int = 1000) -> None:
        super().__init__(every, copies=0)
        self.path = Path(path)

    @override
    def clear(self, storage: PartStorage) -> None:
        """Remove the copies, the rank's folder and, with the last of these, the job's folder."""
        super().clear(storage)
        if isinstance(storage, DiskStorage):
            _remove_if_empty(storage.root)
            _remove_if_empty(storage.root.parent)

    @override
    def open(self, job: str, rank: int) -> PartStorage:
        """Return the part files of the rank in the job's folder.

        Raises:
            OSError: the folder cannot be made, or other users can write to it.
        """
        return DiskStorage(self.path / f"job-{job}" / f"rank-{rank}")


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # another rank's copies are still in it, or it is gone
        folder.rmdir()
