"""The copies that a process keeps of what it writes to checkpoints; they outlive trainers and generations."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import NamedTuple

import torch.distributed as dist

from checkpointless.replication.copier import Copier, Making, Place
from checkpointless.replication.exchange import CliqueExchange, clique_group
from checkpointless.replication.host_memory import HostMemoryPool, recorded
from checkpointless.replication.parts import Content, SaveId
from checkpointless.replication.store import MemoryStore, PartStore, open_store

logger = logging.getLogger(__name__)

# Beyond the time that the checkpoint took to be written; other ranks wait meanwhile.
_EXCHANGE_S = 60.0
_WRITE_S = 20.0  # once: a place that takes longer is left out from then on, until it answers


class Copies:
    """Keeps copies of this rank's share of the newest checkpoints, and of those of its peers.

    The copies of the newest whole checkpoint are kept, and those of checkpoints that are being written. Training
    waits for nothing but the copy in host memory.

    Args:
        memory: whether to keep copies in the memory of the process.
        disk: a place that lasts longer than the process: a directory, or another one that
            :func:`~checkpointless.replication.open_store` knows; None: there is none.
        replication_jump: the distance between ranks that keep copies for each other; 0: the number of ranks on a
            node, so that copies are on the next node.
        replication_factor: how many ranks keep each copy. 1: each rank keeps only its own.

    Raises:
        ValueError: a number is out of range.
        OSError: ``disk`` cannot be used.

    Attributes:
        stores: where copies are kept, by name, the first to be asked first.
    """

    def __init__(
        self,
        *,
        memory: bool = True,
        disk: str | os.PathLike[str] | None = None,
        replication_jump: int = 0,
        replication_factor: int = 1,
    ) -> None:
        if replication_jump < 0 or replication_factor < 1:
            raise ValueError(
                "replication_jump must be 0 or more and replication_factor 1 or more, "
                f"not {replication_jump} and {replication_factor}"
            )
        self.disk, self.replication_jump, self.replication_factor = disk, replication_jump, replication_factor
        stores: dict[str, PartStore] = {"memory": MemoryStore()} if memory else {}
        self.stores: Mapping[str, PartStore] = stores | ({"disk": open_store(disk)} if disk is not None else {})
        self._places: list[Place] = []
        self._copier: Copier | None = None
        self._pool = HostMemoryPool()
        self._made_in: Callable[[], object] = lambda: None  # the default group of the copier's generation
        self._whole: SaveId | None = None  # the newest that is on storage, too
        self._writing: dict[SaveId, _Save] = {}  # those that have not ended

    def prepare(self) -> Copier:
        """Make what this generation needs to keep copies, unless that was done. Collective."""
        world = dist.group.WORLD
        if self._copier is None or self._made_in() is not world:
            if self._copier is not None:
                self._copier.leave()
            exchange = None
            if self.replication_factor > 1:
                exchange = CliqueExchange(clique_group(self.replication_jump, self.replication_factor))
            self._places = [Place(name, store, name == "memory", exchange) for name, store in self.stores.items()]
            self._copier = Copier("keeping copies of checkpoints", self._places, self._of_use)
            self._pool = HostMemoryPool()
            self._made_in = weakref.ref(world)  # a strong one would keep an old generation's communicators
        return self._copier

    @property
    def can_exchange(self) -> bool:
        """Whether this rank can exchange parts with its peers now."""
        return self._copier is None or self._made_in() is not dist.group.WORLD or self._copier.can_exchange

    def keep(self, save: SaveId, content: Content, exchanges: bool = True) -> Content | None:
        """Begin a save: copy this rank's part to host memory, and have the copy kept in the background. Collective.

        Copies of other checkpoints are forgotten, but for the newest whole one and those still being written.
        ``exchanges`` says whether all ranks can exchange parts. Return the copy, which is not to be changed before
        the save has ended; None: there was no room for it.
        """
        copier, copied = self.prepare(), None
        try:
            copied = self._pool.copy(content, recorded())
        except (MemoryError, RuntimeError) as error:  # torch has no exception of its own for the first
            logger.warning("no copy is kept of what rank %d saves: %s", dist.get_rank(), error)
        self._writing[save] = _Save(copier, copier.begin(save, lambda: copied, self._places, exchanges), copied)
        return copied

    def end(self, save: SaveId, is_whole: bool) -> None:
        """End a save: wait, not for long, until its copies are where they belong.

        Unless all of the checkpoint is on storage (``is_whole``), its copies are of no use.
        """
        # Checkpoints end in their order, and their tokens begin with the time: what began before never ends.
        ended = self._writing.get(save)
        if ended is not None and ended.copier is self._copier:  # and not of an earlier generation
            _wait_for(ended.copier, ended.making)
        self._writing = {each: made for each, made in self._writing.items() if each.token > save.token}
        if is_whole and (self._whole is None or self._whole.token < save.token):
            self._whole = save
        of_use = None if self._whole is None else {self._whole, *self._writing}
        if self._copier is not None:
            self._copier.delete(lambda each: each == save if of_use is None else each not in of_use)

    def found(self, save: SaveId) -> None:
        """Note that training goes on from the checkpoint of ``save``: it is the newest whole one."""
        self._whole = save

    def _of_use(self, place: Place, save: SaveId) -> Collection[SaveId] | None:
        return None if self._whole is None else {self._whole, *self._writing}


class _Save(NamedTuple):
    """A save that is being written: who makes its copies, and the one that Megatron's writer reads."""

    copier: Copier
    making: Making
    copied: Content | None


def _wait_for(copier: Copier, making: Making) -> None:
    for event, limit_s, done in ((making.arrived, _EXCHANGE_S, "exchanged"), (making.written, _WRITE_S, "written")):
        if not copier.wait(event, limit_s):
            logger.warning("copies of %s were not %s within %g s", making.save, done, limit_s)
            break
    if making.error is not None:
        logger.warning("%s is kept without what the peers sent: %s", making.save, making.error)


@cache
def process_copies() -> Copies:
    """Return the copies of this process, in its memory alone, which strategies use if they are given none."""
    return Copies()
