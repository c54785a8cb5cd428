"""The memory of neighbors: what a rank loses with its process, other ranks still have."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.recovery.tiers.tier import Tier


class NeighborMemory(Tier):
    """Keeps copies in the host memory of the rank itself and of other ranks.

    It is for jobs that cannot pay for a second instance of the optimizer. Each rank keeps its own state and those
    of ``copies`` other ranks, of two steps: ``2 * (1 + copies)`` times the state of a rank, in host memory.

    Args:
        every: a copy is made after each step that is a multiple of this number.
        copies: how many other ranks keep a copy of each rank's state, at least 1.
        jump: how many ranks these are apart; 0: as many as a node has ranks, or 1 if there is only one node.
        overlap: copy while the next step is being made. A rank that dies before its copy has arrived costs one more
            step. With False, training waits for the copies, and no finished step is lost, unless a further rank
            dies that was still waiting for its copy when the first died.

    Raises:
        ValueError: a number is out of range.
    """

    name: ClassVar[str] = "neighbor memory"
    cost: ClassVar[int] = 10

    def __init__(self, every: int = 1, copies: int = 1, jump: int = 0, *, overlap: bool = True) -> None:
        if copies < 1:
            raise ValueError(f"copies in the memory of neighbors need copies >= 1, not {copies}")
        super().__init__(every, copies, jump)
        self.waits = not overlap

    @property
    @override
    def is_memory(self) -> bool:
        return True

    @override
    def open(self, job: str, rank: int) -> PartStorage:
        """Return parts in the memory of this process."""
        return MemoryStorage(takes_over=True)
