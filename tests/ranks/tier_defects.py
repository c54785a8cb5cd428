"""Tiers whose copies are damaged after they were made, as tiers of one's own that a recipe names."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.disk_storage import DiskStorage
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_file import PartName
from checkpointless.local_checkpoint.part_id import PartId
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.recovery import LocalDirectory, NeighborMemory
from checkpointless.serialization.tensor_memory import tensor_bytes


class DamagedMemory(NeighborMemory):
    """Copies in memory, in which a bit flips.

    Args:
        parts: the ranks whose states are damaged.
        **settings: those of ``NeighborMemory``.
    """

    def __init__(self, parts: Collection[int], **settings: Any) -> None:
        super().__init__(**settings)
        self._parts = parts

    def open(self, job: str, rank: int) -> PartStorage:
        parts = self._parts

        class Damaged(MemoryStorage):
            def write(self, contents: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
                super().write(contents, holder, world_size)
                for part, kept in self._parts.items():
                    if part.part in parts and part in dict(contents):
                        large = max(kept.content.tensors, key=lambda tensor: tensor.nbytes)
                        tensor_bytes(large)[large.nbytes // 2] ^= 1

        return Damaged()


class DamagedDirectory(LocalDirectory):
    """Copies on a disk, in which a bit flips.

    Args:
        parts: the ranks whose states are damaged.
        holders: the ranks whose copies of them are damaged.
        **settings: those of ``LocalDirectory``.
    """

    def __init__(self, parts: Collection[int], holders: Collection[int], **settings: Any) -> None:
        super().__init__(**settings)
        self._parts, self._holders = parts, holders

    def open(self, job: str, rank: int) -> PartStorage:
        parts, holders = self._parts, self._holders

        class Damaged(DiskStorage):
            def write(self, contents: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
                super().write(contents, holder, world_size)
                for part, _ in contents:
                    if part.part in parts and holder in holders:
                        _flip_a_bit(self.root / PartName(part, holder, finished=True).file)

        return Damaged(self.path / f"job-{job}")


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(os.fstat(file.fileno()).st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
