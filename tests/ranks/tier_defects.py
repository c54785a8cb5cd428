"""Tiers whose copies are damaged after they were made, as tiers of one's own that a recipe names."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from checkpointless.recovery import LocalDirectory, NeighborMemory
from checkpointless.replication import DirectoryStore, MemoryStore, PartStore
from checkpointless.replication.parts import Part
from checkpointless.replication.store import _FileName
from checkpointless.state.serialization.tensor_memory import tensor_bytes


class DamagedMemory(NeighborMemory):
    """Copies in memory, in which a bit flips.

    Args:
        parts: the ranks whose states are damaged.
        **settings: those of ``NeighborMemory``.
    """

    def __init__(self, parts: Collection[int], **settings: Any) -> None:
        super().__init__(**settings)
        self._parts = parts

    def open(self, job: str, rank: int) -> PartStore:
        parts = self._parts

        class Damaged(MemoryStore):
            def write(self, part: Part, holder: int) -> None:
                super().write(part, holder)
                if part.id.part in parts:
                    large = max(self._parts[part.id].part.content.tensors, key=lambda tensor: tensor.nbytes)
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

    def open(self, job: str, rank: int) -> PartStore:
        parts, holders = self._parts, self._holders

        class Damaged(DirectoryStore):
            def write(self, part: Part, holder: int) -> None:
                super().write(part, holder)
                if part.id.part in parts and holder in holders:
                    _flip_a_bit(self.root / str(_FileName(part.id, part.world_size, holder)))

        return Damaged(Path(self.path) / f"job-{job}")


def _flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(os.fstat(file.fileno()).st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
