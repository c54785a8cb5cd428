"""Copies what a rank writes to checkpoints, and has a thread bring the copies to where they are kept.

Training waits for nothing but the copy in host memory. What one generation copies and exchanges, no later one's
thread touches: memory and process groups are a generation's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import torch

from checkpointless.inprocess.communicators.helper_thread import awaiting
from checkpointless.local_checkpoint.agreement import attempt, own_rank, world_size
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
# Beyond the time that the checkpoint took to be written; other ranks wait meanwhile.
_EXCHANGE_S = 60.0
_WRITE_S = 20.0  # once: a place that takes longer is left out from then on, until it answers


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
        is_memory: whether it is this process's memory, which answers at once.
    """

    name: str
    storage: PartStorage
    is_memory: bool


@dataclass
class _Save:
    """A save of which copies are kept.

    Attributes:
        mine: this rank's part; None: there is none, or no more.
        later: makes the copy that ``mine`` is to be; None: it is made.
        others: the peers' parts.
        is_ended: whether no process writes the checkpoint any more.
        has_failed: whether an exchange of its parts was broken off, so that messages may still be under way.
        writing: in how many places it is still to be written.
        done: set when the parts are exchanged and in memory.
    """

    mine: HostPart | None = None
    later: ForkedCopy | None = None
    others: list[HostPart] = field(default_factory=list)
    is_ended: bool = False
    has_failed: bool = False
    writing: int = 0
    done: Event = field(default_factory=Event)

    @property
    def is_in_use(self) -> bool:
        """Whether a process or a thread may still read or write its memory."""
        return not self.is_ended or self.has_failed or self.writing > 0 or not self.done.is_set()


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
        self._exchange: CliqueExchange | None = None
        if factor > 1:
            self._exchange = CliqueExchange(agreed_jump(jump, factor), factor, timeout_of_the_job())
        self._lane = Lane("keeping copies of checkpoints")
        # One for each place that may not answer, so that it holds up nothing else.
        self._writers = {
            place.name: Lane(f"keeping copies of checkpoints ({place.name})")
            for place in places
            if not place.is_memory
        }
        # Own parts belong to the thread that trains, the others' to the lane. New memory is slow when it is first
        # written to, so it is used for save after save.
        self._is_forked = not torch.cuda.is_initialized()
        self._own, self._others = HostMemoryPool(shared=self._is_forked), HostMemoryPool()
        self._saves: dict[SaveId, _Save] = {}  # in the order in which they began
        self._writing = dict.fromkeys(self._writers, 0)  # saves that are still to be written
        self._has_failed = False  # an exchange has: what peers wait for is not known any more

    @property
    def can_exchange(self) -> bool:
        """Whether parts can be exchanged now: nothing has failed, and nothing is being exchanged."""
        return not self._has_failed and not self._lane.has_ended and self._lane.is_idle

    def leave(self) -> None:
        """Keep nothing more: another generation has begun."""
        for lane in (self._lane, *self._writers.values()):
            lane.leave()

    def keep(self, save: SaveId, content: Content, used: Collection[SaveId], exchanges: bool) -> Kept:
        """Copy a part to host memory, and begin to bring it to where copies are kept. Collective.

        If all of it lies in host memory, the copy is left to the process that is forked to write the checkpoint.

        Args:
            save: the save.
            content: this rank's part, with the live tensors.
            used: the saves whose copies are of use, besides.
            exchanges: whether all ranks can exchange parts.
        """
        saves = self._saves.items()
        self._saves = {each: kept for each, kept in saves if each in used or kept.is_in_use}
        self._own.keep_only([kept.mine for kept in self._saves.values() if kept.mine is not None])
        kept = self._saves[save] = _Save()
        try:
            room = laid_out(content, self._own)
            if self._is_forked and all(tensor.device.type == "cpu" for tensor in content.tensors):
                kept.later = ForkedCopy(room, content.tensors)
            else:
                copy_into(room, content.tensors, recorded())
            kept.mine = room
        except (MemoryError, RuntimeError, OSError) as error:  # torch has no exception of its own for the first
            logger.warning("no copy is kept of what rank %d saves: %s", self._rank, error)
        self._lane.do(partial(self._bring, PartId(save, self._rank), kept, exchanges))
        return Kept(kept.mine.content if kept.mine is not None else None, kept.later)

    def end(self, save: SaveId) -> None:
        """Wait, not for long, until the copies of ``save`` are where they belong, and use its memory again later.

        Saves that began before and have not ended never will: checkpoints end in their order.
        """
        if save not in self._saves:
            return  # of another generation
        for each, kept in self._saves.items():
            kept.is_ended = True
            if kept.later is not None:
                kept.later.forget()
            if each == save:
                break
        kept = self._saves[save]
        with awaiting(self._lane.thread):
            if not self._wait(lambda: kept.done.is_set() or self._lane.is_idle, _EXCHANGE_S):
                logger.warning("copies of %s were not exchanged within %g s", save, _EXCHANGE_S)
            elif not self._wait(lambda: kept.writing == 0, _WRITE_S):
                logger.warning("copies of %s were not written within %g s", save, _WRITE_S)

    @staticmethod
    def _wait(condition: Callable[[], bool], limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_TURN_S)
        return True

    def forget(self, save: SaveId) -> None:
        """Delete the copies of a save: in memory now, elsewhere as soon as the place answers."""
        self._delete(lambda storage: storage.delete(save))

    def forget_all_but(self, keep: Collection[SaveId]) -> None:
        """Delete the other copies: in memory now, elsewhere as soon as the place answers."""
        self._delete(lambda storage: storage.delete_all_but(keep))

    def _delete(self, delete: Callable[[PartStorage], None]) -> None:
        def attempted(place: Place) -> None:
            _, problem = attempt(partial(delete, place.storage))
            if problem is not None:
                logger.warning("old copies in %s cannot be deleted: %s", place.name, problem)

        for place in self._places:
            if place.is_memory:
                attempted(place)
            else:
                self._writers[place.name].do(partial(attempted, place))

    def _bring(self, name: PartId, kept: _Save, exchanges: bool) -> None:
        """Exchange parts with the peers, and write all to where copies are kept. Runs in the lane."""
        try:
            mine = kept.mine if kept.later is None or self._is_made(kept.later, name) else None
            parts = [(name, mine.content)] if mine is not None else []
            if self._exchange is not None and exchanges:
                self._others.keep_only([each for save in [*self._saves.values()] for each in save.others])
                try:
                    for sender, theirs in self._exchange.exchange(mine, self._others):
                        kept.others.append(theirs)
                        parts.append((PartId(name.save, sender), theirs.content))
                except Exception as error:  # noqa: BLE001 - whatever it is, the peers and this rank are not in step
                    self._has_failed = kept.has_failed = True
                    if not self._lane.is_left:
                        logger.warning("%s is kept without what the peers sent: %s", name.words, error)
            for place in self._places:
                if place.is_memory:
                    write_parts(place.storage, parts, self._rank, self._world_size)
                elif self._writing[place.name] == 0:
                    self._writing[place.name] += 1
                    kept.writing += 1
                    self._writers[place.name].do(partial(self._write, place, parts, kept))
                else:
                    logger.warning("%s is not kept in %s: the one before is still written", name.words, place.name)
        finally:
            kept.done.set()

    def _write(self, place: Place, parts: Sequence[tuple[PartId, Content]], kept: _Save) -> None:
        """Write parts to a place that lasts. Runs in the place's lane."""
        try:
            write_parts(place.storage, parts, self._rank, self._world_size)
        finally:
            self._writing[place.name] -= 1
            kept.writing -= 1

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
