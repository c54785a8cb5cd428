"""The members of a clique give each other their parts, over a process group that nothing else uses.

All members exchange at the same time: in turn d each member sends its part to the member d places further on, and
receives one from the member as many places back. What arrives damaged is sent again, first the header and then the
tensors, each with its digest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from checkpointless.local_checkpoint.replication import clique_group
from checkpointless.recovery.tiers.host_part import HostMemoryPool, HostPart, room_for
from checkpointless.transfer.exchange import to_bytes, to_tensor

logger = logging.getLogger(__name__)

_TRIES = 3
_CHUNK_BYTES = 64 * 1024 * 1024
_HEADER_BYTES = 2 * 1024 * 1024 * 1024  # the most that a header may claim to take
_PART_BYTES = 1 << 44  # the same of a part


@dataclass(frozen=True)
class _Offer:
    """A part as it is sent: two flat uint8 tensors, both empty if there is none.

    Attributes:
        header: everything but the tensors.
        memory: the tensors.
    """

    header: torch.Tensor
    memory: torch.Tensor

    def announced(self) -> torch.Tensor:
        """Return the sizes in bytes, and the digests, as an int64 tensor of shape ``(4,)``."""
        sizes = [self.header.numel(), self.memory.numel()]
        return torch.tensor([*sizes, _digest(self.header), _digest(self.memory)], dtype=torch.int64)


@dataclass(frozen=True)
class _Link:
    """Whom this rank sends to in a turn, and whom it receives from."""

    receiver: int
    sender: int


class CliqueExchange:
    """Exchanges parts among the members of one clique. All members call each method together.

    Making it is a collective of all ranks of the job.

    Args:
        jump: how many ranks apart the members are.
        factor: how many members a clique has.
        timeout: how long a wait for another member may take; None: as long as torch waits by default.

    Attributes:
        members: the global ranks of this rank's clique.
    """

    def __init__(self, jump: int, factor: int, timeout: timedelta | None) -> None:
        self._group: Any = clique_group(jump, factor, timeout, backend="gloo")
        self.members = tuple(dist.get_process_group_ranks(self._group))
        self._place = self.members.index(dist.get_rank())

    def exchange(self, part: HostPart | None, pool: HostMemoryPool) -> Iterator[tuple[int, HostPart]]:
        """Give ``part`` to all other members, and yield each of theirs, with the global rank that it is of.

        What a member cannot give, has no room for, or receives damaged three times costs that copy and a warning.

        Args:
            part: this rank's part; None: it has none this time.
            pool: gives the memory for what arrives.

        Raises:
            RuntimeError: a member is gone, or the group was aborted.
            ValueError: a member announced what cannot be.
        """
        nothing = torch.empty(0, dtype=torch.uint8)
        header = to_tensor(part.header(), torch.device("cpu")) if part is not None else nothing
        offer = _Offer(header, part.memory if part is not None else nothing)
        for distance in range(1, len(self.members)):
            link = _Link(
                self.members[(self._place + distance) % len(self.members)],
                self.members[(self._place - distance) % len(self.members)],
            )
            arrived = self._turn(offer, link, pool)
            if arrived is not None:
                yield link.sender, arrived

    def _turn(self, offer: _Offer, link: _Link, pool: HostMemoryPool) -> HostPart | None:
        told = torch.zeros(4, dtype=torch.int64)
        self._pass([offer.announced()], [told], link)
        header_bytes, memory_bytes, header_digest, memory_digest = map(int, told)
        if not 0 <= header_bytes <= _HEADER_BYTES or not 0 <= memory_bytes <= _PART_BYTES:
            raise ValueError(f"rank {link.sender} announced a part of {header_bytes} and {memory_bytes} bytes")
        header = torch.empty(header_bytes, dtype=torch.uint8)
        arrived = self._deliver(offer.header, header, header_digest, link, wanted=header_bytes > 0)
        room = _room(header, memory_bytes, link.sender, pool) if arrived else None
        memory = room.memory if room is not None else torch.empty(0, dtype=torch.uint8)
        arrived = self._deliver(offer.memory, memory, memory_digest, link, wanted=room is not None)
        return room if arrived else None

    def _deliver(self, mine: torch.Tensor, theirs: torch.Tensor, digest: int, link: _Link, *, wanted: bool) -> bool:
        """Send ``mine`` if the receiver wants it, and receive ``theirs`` if this rank does, until both are right.

        Of what is not wanted any more nothing is said: at its other end, the turn may be over.

        Returns:
            Whether ``theirs`` has arrived as it was sent.
        """
        wants, is_wanted = wanted, self._answers(wanted, True, True, link)
        for _ in range(_TRIES):
            if not wants and not is_wanted:
                break
            self._pass(_chunks(mine) if is_wanted else [], _chunks(theirs) if wants else [], link)
            again = wants and _digest(theirs) != digest
            is_wanted, wants = self._answers(again, wants, is_wanted, link), again
        if wants:
            logger.warning("the copy of rank %d's state arrived damaged %d times", link.sender, _TRIES)
        return wanted and not wants

    def _answers(self, wants: bool, is_asked: bool, was_wanted: bool, link: _Link) -> bool:
        """Tell the sender whether its part is wanted, and return what the receiver says of this rank's.

        Args:
            wants: whether this rank wants the sender's part (again).
            is_asked: whether the sender waits for that answer.
            was_wanted: whether the receiver still has something to answer.
            link: the two.
        """
        told = torch.zeros(1, dtype=torch.uint8)
        mine = [torch.tensor([wants], dtype=torch.uint8)] if is_asked else []
        self._pass(mine, [told] if was_wanted else [], _Link(link.sender, link.receiver))
        return bool(told.item())

    def _pass(self, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], link: _Link) -> None:
        """Send ``mine`` to one rank, and receive ``theirs`` from another, at the same time."""
        works: list[Any] = [dist.irecv(each, link.sender, group=self._group) for each in theirs]
        works += [dist.isend(each, link.receiver, group=self._group) for each in mine]
        for work in works:
            work.wait()


def _room(header: torch.Tensor, nbytes: int, sender: int, pool: HostMemoryPool) -> HostPart | None:
    """Return room for what a member sends; None, with a warning, if this rank has none."""
    try:
        return room_for(to_bytes(header), nbytes, pool)
    except (MemoryError, RuntimeError, ValueError) as error:  # torch raises the second if it cannot allocate
        logger.warning("no room for the copy of rank %d's state, %d bytes: %s", sender, nbytes, error)
        return None


def _digest(flat: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(flat.numpy().data) - (1 << 63)  # as a number with a sign, for a tensor


def _chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[start : start + _CHUNK_BYTES] for start in range(0, flat.numel(), _CHUNK_BYTES)]
