"""The members of a clique give each other their parts, over a process group that nothing else uses.

All members exchange at the same time: in turn d each member sends its part to the member d places further on, and
receives one from the member as many places back. A part that arrives damaged is sent again.
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
        """Return the sizes in bytes, and the digest, as an int64 tensor of shape ``(3,)``."""
        digest = _digest(self.header, self.memory)
        return torch.tensor([self.header.numel(), self.memory.numel(), digest], dtype=torch.int64)

    def headers(self) -> list[torch.Tensor]:
        """Return the header as what is to be sent: nothing, if there is no part."""
        return [self.header] if self.header.numel() else []


@dataclass(frozen=True)
class _Wants:
    """Whether a part is still to be sent.

    Attributes:
        mine: whether this rank wants the sender's.
        theirs: whether the receiver wants this rank's.
    """

    mine: bool
    theirs: bool


class CliqueExchange:
    """Exchanges parts among the members of one clique. All members call each method together.

    Args:
        members: the global ranks of the clique, this one among them.
        timeout: how long a wait for another member may take; None: as long as torch waits by default.
    """

    def __init__(self, members: Sequence[int], timeout: timedelta | None) -> None:
        self.members = tuple(members)
        self._place = self.members.index(dist.get_rank())
        self._group: Any = dist.new_group(
            list(members), backend="gloo", timeout=timeout, use_local_synchronization=True
        )

    def exchange(self, part: HostPart | None, pool: HostMemoryPool) -> Iterator[tuple[int, HostPart]]:
        """Give ``part`` to all other members, and yield each of theirs, with the global rank that it is of.

        What a member cannot give, has no room for, or receives damaged three times costs that copy and a warning.

        Args:
            part: this rank's part; None: it has none this time.
            pool: gives the memory for what arrives.

        Raises:
            RuntimeError: a member is gone, or the group was aborted.
            ValueError: a member sent something that is no part.
        """
        header = to_tensor(part.header(), torch.device("cpu")) if part is not None else torch.empty(0).byte()
        offer = _Offer(header, part.memory if part is not None else torch.empty(0).byte())
        for distance in range(1, len(self.members)):
            receiver = self.members[(self._place + distance) % len(self.members)]
            sender = self.members[(self._place - distance) % len(self.members)]
            arrived = self._turn(offer, receiver, sender, pool)
            if arrived is not None:
                yield sender, arrived

    def _turn(self, offer: _Offer, receiver: int, sender: int, pool: HostMemoryPool) -> HostPart | None:
        told = torch.zeros(3, dtype=torch.int64)
        self._pass([offer.announced()], receiver, [told], sender)
        header_bytes, memory_bytes, digest = map(int, told)
        if not 0 <= header_bytes <= _HEADER_BYTES or not 0 <= memory_bytes <= _PART_BYTES:
            raise ValueError(f"rank {sender} announced a part of {header_bytes} and {memory_bytes} bytes")
        header = torch.empty(header_bytes, dtype=torch.uint8)
        self._pass(offer.headers(), receiver, [header] if header_bytes else [], sender)
        room = _room(header, memory_bytes, sender, pool)
        wants = self._agree(room is not None, _Wants(mine=True, theirs=True), sender, receiver)
        for _ in range(_TRIES):
            if not wants.mine and not wants.theirs:
                break
            self._pass(
                _chunks(offer.memory) if wants.theirs else [],
                receiver,
                _chunks(room.memory) if wants.mine and room is not None else [],
                sender,
            )
            again = wants.mine and room is not None and _digest(header, room.memory) != digest
            wants = self._agree(again, wants, sender, receiver)
        if wants.mine:
            logger.warning("the copy of rank %d's state arrived damaged %d times; it is not kept", sender, _TRIES)
        return None if wants.mine else room

    def _agree(self, again: bool, before: _Wants, sender: int, receiver: int) -> _Wants:
        """Tell the sender whether its part is wanted again, and hear the same from the receiver.

        A part that was not wanted before is not spoken of any more: at its other end, the turn may be over.
        """
        told = torch.zeros(1, dtype=torch.uint8)
        mine = [torch.tensor([again], dtype=torch.uint8)] if before.mine else []
        self._pass(mine, sender, [told] if before.theirs else [], receiver)
        return _Wants(again, bool(told.item()))

    def _pass(
        self, mine: Sequence[torch.Tensor], receiver: int, theirs: Sequence[torch.Tensor], sender: int
    ) -> None:
        """Send ``mine`` to one rank, and receive ``theirs`` from another, at the same time."""
        works: list[Any] = [dist.irecv(each, sender, group=self._group) for each in theirs]
        works += [dist.isend(each, receiver, group=self._group) for each in mine]
        for work in works:
            work.wait()


def _room(header: torch.Tensor, nbytes: int, sender: int, pool: HostMemoryPool) -> HostPart | None:
    """Return room for what a member sends; None, with a warning, if this rank has none or there is nothing."""
    if not header.numel():
        return None
    try:
        return room_for(to_bytes(header), nbytes, pool)
    except (MemoryError, RuntimeError) as error:  # torch raises the latter if it cannot allocate memory
        logger.warning("no room for the copy of rank %d's state, %d bytes: %s", sender, nbytes, error)
        return None


def _digest(header: torch.Tensor, memory: torch.Tensor) -> int:
    digest = xxhash.xxh3_64(header.numpy().data)
    digest.update(memory.numpy().data)
    return digest.intdigest() - (1 << 63)  # as a number with a sign, which a tensor can hold


def _chunks(memory: torch.Tensor) -> list[torch.Tensor]:
    return [memory[start : start + _CHUNK_BYTES] for start in range(0, memory.numel(), _CHUNK_BYTES)]
