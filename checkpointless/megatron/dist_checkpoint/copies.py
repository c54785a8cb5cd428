"""The copies that a process keeps of what it writes to checkpoints: where they are, and which are kept.

They outlive trainers and generations: a block that is entered again finds them, as long as the process lives or
the place lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from checkpointless.local_checkpoint.agreement import attempt, own_rank, world_size
from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.manager import write_parts
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.local_checkpoint.replication import ReplicationStrategy
from checkpointless.transfer.bucket_rounds import TransferError

logger = logging.getLogger(__name__)


class ReusedMemory:
    """Tensors in host memory that are used for save after save: new memory is slow when it is first written to."""

    def __init__(self) -> None:
        self._of: dict[SaveId, list[torch.Tensor]] = {}
        self._ended: set[SaveId] = set()
        self._free: dict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = {}

    def take(self, save: SaveId, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor for ``save``, of the shape and dtype of ``like``, that nothing else uses."""
        free = self._free.get((like.dtype, like.shape))
        taken = free.pop() if free else torch.empty(like.shape, dtype=like.dtype, device="cpu")
        self._of.setdefault(save, []).append(taken)
        return taken

    def ended(self, save: SaveId) -> None:
        """Note that no writer reads the tensors of ``save`` any more."""
        self._ended.add(save)

    def free_all_but(self, keep: Collection[SaveId | None]) -> None:
        """Use the tensors of saves that have ended and are not in ``keep`` again; what was free is given back."""
        self._free = {}
        for save in [save for save in self._of if save in self._ended and save not in keep]:
            for tensor in self._of.pop(save):
                self._free.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
        self._ended &= self._of.keys()


@dataclass(frozen=True)
class Place:
    """Somewhere that copies are kept.

    Attributes:
        name: what messages call it.
        storage: the place.
        is_memory: whether it is this process's memory, so that it can be written to only by this process.
    """

    name: str
    storage: PartStorage
    is_memory: bool


class Copies:
    """Keeps copies of this rank's share of the newest checkpoints, and of those of its peers.

    The copies of the newest whole checkpoint are kept, and those of checkpoints that are being written.

    Args:
        memory: whether to keep copies in the memory of the process.
        disk: a place that lasts longer than the process, such as a
            :class:`~checkpointless.local_checkpoint.disk_storage.DiskStorage`; None: there is none.
        replication: decides which ranks keep copies for each other; None: each rank keeps only its own.
    """

    def __init__(
        self,
        *,
        memory: bool = True,
        disk: PartStorage | None = None,
        replication: ReplicationStrategy | None = None,
    ) -> None:
        places = [Place("memory", MemoryStorage(takes_over=True), True)] if memory else []
        places += [Place("disk", disk, False)] if disk is not None else []
        self.places: tuple[Place, ...] = tuple(places)
        self.replication = replication
        self._room = ReusedMemory()
        self._whole: SaveId | None = None  # the newest that is on storage, too
        self._writing: SaveId | None = None

    def begin(self, save: SaveId) -> None:
        """Begin a save: forget all others but the newest whole one and the one that may still be written."""
        if self._whole is not None:
            self._forget_all_but(self._whole, self._writing, save)
            self._room.free_all_but((self._whole, self._writing, save))
        self._writing = save

    def room(self, save: SaveId, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor in host memory for a part of ``save``, of the shape and dtype of ``like``."""
        return self._room.take(save, like)

    def keep(self, save: SaveId, content: Content) -> list[tuple[PartId, Content]]:
        """Keep this rank's part in memory, and exchange it with the peers'. Collective.

        Args:
            save: the save.
            content: this rank's part, in host memory. It is not to be changed any more.

        Returns:
            All parts that this rank keeps, for :meth:`write`.
        """
        part = PartId(save, own_rank())
        parts = [(part, content)]
        if self.replication is not None:
            try:
                states, names = self.replication.replicate(content.state(), str(part))
                parts = [(PartId.parse(name), Content.of(state)) for state, name in zip(states, names)]
            except TransferError as error:
                logger.warning("%s is kept without what the peers sent: %s", part.words, error)
        for place in self.places:
            if place.is_memory:
                write_parts(place.storage, parts, own_rank(), world_size())
        return parts

    @property
    def lasting(self) -> tuple[PartStorage, ...]:
        """The places that any process can write to."""
        return tuple(place.storage for place in self.places if not place.is_memory)

    def end(self, save: SaveId, is_whole: bool) -> None:
        """End a save.

        Args:
            save: the save.
            is_whole: whether all of the checkpoint is on storage. Otherwise its copies are of no use.
        """
        self._room.ended(save)
        if self._writing == save:
            self._writing = None
        if not is_whole:
            for place in self.places:
                place.storage.delete(save)
        elif self._whole is None or self._whole.token < save.token:  # they begin with the time
            self._whole = save
            self._forget_all_but(save, self._writing)

    def found(self, save: SaveId) -> None:
        """Note that training goes on from the checkpoint of ``save``: it is the newest whole one."""
        self._whole = save

    def _forget_all_but(self, *keep: SaveId | None) -> None:
        for place in self.places:
            _, problem = attempt(partial(place.storage.delete_all_but, keep))
            if problem is not None:
                logger.warning("old copies in %s cannot be deleted: %s", place.name, problem)


def write(
    storages: Sequence[PartStorage], parts: Sequence[tuple[PartId, Content]], holder: int, ranks: int
) -> None:
    """Write parts to places that last. It may run in a process of its own; what cannot be written is a warning.

    Args:
        storages: the places.
        parts: this rank's part and those of its peers.
        holder: this rank.
        ranks: the number of ranks of the job.
    """
    for storage in storages:
        write_parts(storage, parts, holder, ranks)


@cache
def process_copies() -> Copies:
    """Return the copies of this process, in its memory alone, which strategies use if they are given none."""
    return Copies()
