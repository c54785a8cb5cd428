"""Copies what a rank writes to checkpoints, and has a thread bring the copies to where they are kept.

Training waits for nothing but the copy in host memory. What one generation copies and exchanges, no later one's
thread touches: memory and process groups are a generation's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Event

import torch

from checkpointless.inprocess.communicators.helper_thread import awaiting
from checkpointless.local_checkpoint.agreement import own_rank, world_size
from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.manager import write_parts
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartStorage
from checkpointless.local_checkpoint.replication import agreed_jump, timeout_of_the_job
from checkpointless.megatron.dist_checkpoint.forked_copy import ForkedCopy
from checkpointless.recovery.tiers.clique_exchange import CliqueExchange
from checkpointless.recovery.tiers.host_part import HostMemoryPool, HostPart, copy_into, laid_out, recorded
from checkpointless.recovery.tiers.lane import Lane

logger = logging.getLogger(__name__)

_TURN_S = 0.02
_KEEPING_LIMIT = timedelta(minutes=10)  # if the job has no timeout of its own


@dataclass(frozen=True)
class Kept:
    """What this rank keeps of a save.

    Attributes:
        content: the copy in host memory, which is not to be changed before the save has ended; None: there was no
            room, as a warning said.
        later: makes the copy, which has not been made yet; None: it has been.
    """

    content: Content | None
    later: ForkedCopy | None = None


@dataclass(frozen=True)
class Place:
    """Somewhere that copies are kept.

    Attributes:
        name: what messages call it.
        storage: the place.
    """

    name: str
    storage: PartStorage


class Keeper:
    """Keeps copies in one generation. Making it is a collective of all ranks.

    Args:
        places: where copies are kept.
        jump: the distance between ranks that keep copies for each other; 0: the number of ranks on a node.
        factor: how many ranks keep each copy.

    Raises:
        ValueError: the ranks cannot be divided that way.
    """

    def __init__(self, places: Sequence[Place], jump: int, factor: int) -> None:
        self._places = places
        self._rank, self._world_size = own_rank(), world_size()
        self._timeout = timeout_of_the_job()
        self._exchange: CliqueExchange | None = None
        if factor > 1:
            self._exchange = CliqueExchange(agreed_jump(jump, factor), factor, self._timeout)
        self._lane = Lane("keeping copies of checkpoints")
        # Own parts belong to the thread that trains, the others' to the lane. New memory is slow when it is first
        # written to, so it is used for save after save.
        self._is_forked = not torch.cuda.is_initialized()
        self._own, self._others = HostMemoryPool(shared=self._is_forked), HostMemoryPool()
        self._mine: dict[SaveId, HostPart] = {}
        self._arrived: dict[SaveId, list[HostPart]] = {}
        self._done: dict[SaveId, Event] = {}
        self._later: dict[SaveId, ForkedCopy] = {}
        self._ended: set[SaveId] = set()

    def leave(self) -> None:
        """Keep nothing more: another generation has begun."""
        self._lane.leave()

    def keep(self, save: SaveId, content: Content, others: Collection[SaveId | None]) -> Kept:
        """Copy a part to host memory, and begin to bring it to where copies are kept. Collective.

        If all of it lies in host memory, the copy is left to the process that is forked to write the checkpoint.

        Args:
            save: the save.
            content: this rank's part, with the live tensors.
            others: the saves whose copies are still of use.
        """
        used = {*others, save}
        self._mine = {each: part for each, part in self._mine.items() if each in used or each not in self._ended}
        self._own.keep_only([*self._mine.values()])
        self._ended &= {*self._mine, *self._arrived}
        part, later = None, None
        try:
            room = laid_out(content, self._own)
            if self._is_forked and all(tensor.device.type == "cpu" for tensor in content.tensors):
                later = self._later[save] = ForkedCopy(room, content.tensors)
            else:
                copy_into(room, content.tensors, recorded())
            part = self._mine[save] = room
        except (MemoryError, RuntimeError) as error:  # torch has no exception of its own for the first
            logger.warning("no copy is kept of what rank %d saves: %s", self._rank, error)
        done = self._done[save] = Event()
        self._lane.do(partial(self._bring, PartId(save, self._rank), part, later, used, done))
        return Kept(part.content if part is not None else None, later)

    def end(self, save: SaveId) -> None:
        """Wait until the copies of ``save`` are where they belong. Its memory may then be used again."""
        later = self._later.pop(save, None)
        if later is not None:
            later.forget()
        done = self._done.pop(save, None)
        limit_s = (self._timeout or _KEEPING_LIMIT).total_seconds()
        deadline_s = time.monotonic() + limit_s
        with awaiting(self._lane.thread):
            while done is not None and not done.wait(_TURN_S) and not self._lane.is_idle:
                if time.monotonic() > deadline_s:
                    logger.warning("copies of %s were not where they belong after %g s", save, limit_s)
                    return
        self._ended.add(save)

    def _bring(
        self,
        name: PartId,
        part: HostPart | None,
        later: ForkedCopy | None,
        used: Collection[SaveId | None],
        done: Event,
    ) -> None:
        """Exchange parts with the peers, and write all to where copies are kept. Runs in the lane."""
        try:
            if later is not None and not self._is_made(later, name):
                part = None
            kept = self._arrived.items()
            self._arrived = {each: parts for each, parts in kept if each in used or each not in self._ended}
            self._others.keep_only([each for parts in self._arrived.values() for each in parts])
            parts = [(name, part.content)] if part is not None else []
            if self._exchange is not None:
                arrived = self._arrived[name.save] = []
                try:
                    for sender, theirs in self._exchange.exchange(part, self._others):
                        arrived.append(theirs)
                        parts.append((PartId(name.save, sender), theirs.content))
                except (RuntimeError, ValueError) as error:
                    if not self._lane.is_left:
                        logger.warning("%s is kept without what the peers sent: %s", name.words, error)
            for place in self._places:
                write_parts(place.storage, parts, self._rank, self._world_size)
        finally:
            done.set()

    def _is_made(self, later: ForkedCopy, name: PartId) -> bool:
        """Wait for the process that makes a copy, and return whether it did. The save ends after that process."""
        while not later.is_made and not later.is_forgotten and not self._lane.is_left:
            time.sleep(_TURN_S)
        is_made = later.is_made
        if not is_made and not self._lane.is_left:
            logger.warning("no copy is kept of %s: its writer did not come to making it", name.words)
        return is_made


def in_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in host memory as one whose storage is no larger; the memory is the same.

    Megatron copies tensors that are views of more than themselves once more.
    """
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    flat = tensor.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(flat.data, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
