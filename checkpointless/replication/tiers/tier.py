"""Tiers: where copies of the state are kept, how often they are made, and what it costs to use them."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from checkpointless.replication.directory import DirectoryStore
from checkpointless.replication.store import MemoryStore, PartStore, open_store


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
    def open(self, job: str, rank: int) -> PartStore:
        """Return the store in which this rank keeps parts, its own and its neighbors'.

        Args:
            job: names the job; a letter or digit each. Parts of other jobs must not be found.
            rank: this rank.

        Raises:
            OSError: the place cannot be used.
        """

    def clear(self, store: PartStore) -> None:
        """Remove what this rank keeps, since the job has ended well. A failure is only logged.

        Args:
            store: what :meth:`open` returned.
        """
        store.delete(lambda save: True)

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
    def open(self, job: str, rank: int) -> PartStore:
        return MemoryStore()


class _Directory(Tier):
    """Keeps copies in folders of a directory, or of another place that :func:`open_store` knows."""

    def __init__(self, path: str | os.PathLike[str], every: int, copies: int, jump: int = 0) -> None:
        super().__init__(every, copies, jump)
        self.path = os.fspath(path)

    def _folders(self, job: str, rank: int) -> tuple[str, ...]:
        """Return the folders in the directory in which the parts of a rank lie, the outer one first."""
        return (f"job-{job}",)

    @override
    def open(self, job: str, rank: int) -> PartStore:
        return open_store(self.path, *self._folders(job, rank))

    @override
    def clear(self, store: PartStore) -> None:
        super().clear(store)
        folder = store.root if isinstance(store, DirectoryStore) else Path(self.path)
        with suppress(OSError):  # another rank's copies are still in it, or it is gone
            while folder != Path(self.path):
                folder.rmdir()
                folder = folder.parent


class LocalDirectory(_Directory):
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
        super().__init__(path, every, copies, jump)


class SharedDirectory(_Directory):
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
        super().__init__(path, every, copies=0)

    @override
    def _folders(self, job: str, rank: int) -> tuple[str, ...]:
        return (*super()._folders(job, rank), f"rank-{rank}")


#: The tiers by the names that recipes use.
TIERS: Mapping[str, type[Tier]] = {
    "neighbor_memory": NeighborMemory,
    "local_directory": LocalDirectory,
    "shared_directory": SharedDirectory,
}


def make_tiers(settings: Mapping[str, Mapping[str, Any] | None]) -> list[Tier]:
    """Return the tiers that a recipe asks for.

    Args:
        settings: the arguments of each tier by its name in :data:`TIERS`, or by the dotted name of a class of one's
            own.

    Raises:
        ValueError: a tier is not known, or not made in this way; the message is one line that says what to do.
    """
    made = []
    for name, arguments in settings.items():
        kind = TIERS.get(name) or _imported(name)
        try:
            made.append(kind(**(arguments or {})))
        except (TypeError, ValueError) as error:
            raise ValueError(f"tier {name}: {str(error).replace(f'{kind.__name__}.__init__() ', '')}") from error
    return made


def _imported(name: str) -> type[Tier]:
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute) if module else None
    except (ImportError, AttributeError):
        kind = None
    if not isinstance(kind, type) or not issubclass(kind, Tier):
        raise ValueError(f"no tier is called {name}: use {', '.join(TIERS)}, or the dotted name of your class")
    return kind
