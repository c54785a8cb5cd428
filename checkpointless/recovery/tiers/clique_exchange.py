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
class _Announcement:
    """What is said of a part before it is sent."""

    header: int  # bytes
    memory: int  # bytes
    digest: int  # of header and memory, as a signed number of 64 bits


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

    def exchange(self, part: HostPart, pool: HostMemoryPool) -> Iterator[tuple[int, HostPart]]:
        """Give ``part`` to all other members, and yield each of theirs, with the global rank that it is of.

        A part that does not arrive undamaged in three tries is left out, with a warning.

        Args:
            part: this rank's part.
            pool: gives the memory for what arrives.

        Raises:
            RuntimeError: a member is gone, or the group was aborted.
            ValueError: a member sent something that is no part.
        """
        header = to_tensor(part.header(), torch.device("cpu"))
        digest = _digest(header, part.memory)
        for distance in range(1, len(self.members)):
            receiver = self.members[(self._place + distance) % len(self.members)]
            sender = self.members[(self._place - distance) % len(self.members)]
            arrived = self._turn(header, digest, part, receiver, sender, pool)
            if arrived is not None:
                yield sender, arrived

    def _turn(
        self, header: torch.Tensor, digest: int, part: HostPart, receiver: int, sender: int, pool: HostMemoryPool
    ) -> HostPart | None:
        sizes = torch.tensor([header.numel(), part.memory.numel(), digest], dtype=torch.int64)
        heard = torch.zeros_like(sizes)
        self._pass([sizes], receiver, [heard], sender)
        coming = _Announcement(*map(int, heard))
        if not 0 < coming.header <= _HEADER_BYTES or not 0 <= coming.memory <= _PART_BYTES:
            raise ValueError(f"rank {sender} announced a part of {coming.header} and {coming.memory} bytes")
        their_header = torch.empty(coming.header, dtype=torch.uint8)
        self._pass([header], receiver, [their_header], sender)
        room = room_for(to_bytes(their_header), coming.memory, pool)
        wants = is_wanted = True  # whether the sender's part is still to come, and ours is still to be sent
        for _ in range(_TRIES):
            self._pass(
                _chunks(part.memory) if is_wanted else [], receiver, _chunks(room.memory) if wants else [], sender
            )
            again = wants and _digest(their_header, room.memory) != coming.digest
            answer, heard = torch.tensor([again], dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
            self._pass([answer] if wants else [], sender, [heard] if is_wanted else [], receiver)
            wants, is_wanted = again, bool(heard.item())
            if not wants and not is_wanted:
                break
        if wants:
            logger.warning("the copy of rank %d's state arrived damaged %d times; it is not kept", sender, _TRIES)
        return None if wants else room

    def _pass(
        self, mine: Sequence[torch.Tensor], receiver: int, theirs: Sequence[torch.Tensor], sender: int
    ) -> None:
        """Send ``mine`` to one rank, and receive ``theirs`` from another, at the same time."""
        works: list[Any] = [dist.irecv(each, sender, group=self._group) for each in theirs]
        works += [dist.isend(each, receiver, group=self._group) for each in mine]
        for work in works:
            work.wait()


def _digest(header: torch.Tensor, memory: torch.Tensor) -> int:
    digest = xxhash.xxh3_64(header.numpy().data)
    digest.update(memory.numpy().data)
    return digest.intdigest() - (1 << 63)  # as a number with a sign, which a tensor can hold


def _chunks(memory: torch.Tensor) -> list[torch.Tensor]:
    return [memory[start : start + _CHUNK_BYTES] for start in range(0, memory.numel(), _CHUNK_BYTES)]
