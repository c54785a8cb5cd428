"""What a tier is: where copies of the state are kept, how often they are made, and what it costs to use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from checkpointless.local_checkpoint.part_storage import PartStorage


class Tier(ABC):
    """A place in which copies of all ranks' states are kept.

    A tier of one's own is a subclass with a ``name`` and a ``cost``, and :meth:`open`.

    Args:
        every: a copy is made after each step that is a multiple of this number.
        copies: how many other ranks keep a copy of each rank's state, too.
        jump: how many ranks these are apart; 0: as many as a node has ranks, or 1 if there is only one node.

    Raises:
        ValueError: a number is out of range.

    Attributes:
        name: what the tier is called in messages and events.
        cost: tiers are asked in the order of their costs.
        waits: whether training waits until each copy is where it belongs, before the next step begins.
    """

    name: ClassVar[str]
    cost: ClassVar[int]

    def __init__(self, every: int, copies: int, jump: int = 0) -> None:
        if every < 1 or copies < 0 or jump < 0:
            raise ValueError(
                f"a tier needs every >= 1, copies >= 0 and jump >= 0, not {every}, {copies} and {jump}: "
                "a copy is made after each `every` steps and kept on `copies` other ranks, `jump` ranks apart"
            )
        self.every = every
        self.copies = copies
        self.jump = jump
        self.waits = False

    @abstractmethod
    def open(self, job: str, rank: int) -> PartStorage:
        """Return the storage in which this rank keeps parts, its own and its neighbors'.

        Args:
            job: names the job; a letter or digit each. Parts of other jobs must not be found.
            rank: this rank.

        Raises:
            OSError: the place cannot be used.
        """

    def clear(self, storage: PartStorage) -> None:
        """Remove what this rank keeps, since the job has ended well. A failure is only logged.

        Args:
            storage: what :meth:`open` returned.
        """
        storage.delete_all_but(())

    @property
    def is_memory(self) -> bool:
        """Whether what this rank keeps is lost with its process."""
        return False

    def is_due(self, step: int) -> bool:
        """Return whether a copy is to be made after ``step``."""
        return step > 0 and step % self.every == 0

    def distances(self, world_size: int, node_size: int) -> list[int]:
        """Return how many ranks apart the ranks may be that keep each other's copies, the best first.

        Args:
            world_size: the number of ranks of the job.
            node_size: the number of ranks of a node.

        Raises:
            ValueError: the ranks cannot be divided like that; the message says what is possible.
        """
        across = range(node_size, world_size, node_size)
        wanted = [self.jump] if self.jump else [*across, *range(1, min(node_size, world_size))]
        possible = [jump for jump in wanted if world_size % (jump * (self.copies + 1)) == 0]
        best = (wanted or [1])[0]
        if self.copies and (not possible or (not self.jump and world_size > node_size and possible[0] < node_size)):
            raise ValueError(
                f"{self.name}: {world_size} ranks cannot keep {_copies(self.copies)} each, {best} ranks apart: "
                f"the number of ranks has to be a multiple of jump * (copies + 1) = {best * (self.copies + 1)}"
            )
        return possible or [1]


def _copies(number: int) -> str:
    return "a copy" if number == 1 else f"{number} copies"
