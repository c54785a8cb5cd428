"""The messages under way: launched in groups, in ascending order of their buckets, with a bounded number of groups.

Why groups do not wait for each other in a circle, although the ranks cut them differently: on NCCL a group is done
when all its messages are, and the next one of the same rank begins then. Both ends go through the buckets in
ascending order, and a rank to fill wants each bucket from one holder per round. Take the smallest bucket of which
any message is not done. Each rank to fill that still waits for it has it in its present group, because all smaller
ones are done. So has each holder its first message of that bucket. This message is in the present group at both its
ends, and is done, because NCCL does the messages of a group side by side. Thus there is always a message that can
be done. Between two ranks, messages match in the order of their launch, which is that of the buckets at both ends,
whatever the groups.

The messages before and after the buckets are in the order of the protocol at all ranks, each waiting for the last
one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from checkpointless.transfer.buckets import IN_FLIGHT
from checkpointless.transfer.wire import Message, launch, runs_ahead

_GROUPS = 2  # on a wire that runs ahead: one under way, one that is packed or digested meanwhile


@dataclass
class Parcel:
    """A bucket under way.

    Attributes:
        index: the bucket's number.
        payload: its bytes, or the memory for them, flat uint8.
        messages: what is sent or received; several if several ranks want it.
        slot: the buffer that it is packed in; None if it lies where it belongs.
    """

    index: int
    payload: torch.Tensor
    messages: list[Message]
    slot: torch.Tensor | None

    @property
    def staged_bytes(self) -> int:
        """How many bytes of buffers it takes."""
        return 0 if self.slot is None else self.payload.numel()


@dataclass
class _Group:
    """Parcels that are launched together."""

    parcels: list[Parcel] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    @property
    def staged_bytes(self) -> int:
        return sum(parcel.staged_bytes for parcel in self.parcels)


class Window:
    """Launches parcels and finishes the oldest ones when too much is under way.

    On the CPU each parcel is launched at once, with eight under way. On a wire that runs ahead they are
    launched in groups of as many, so that messages with several ranks are done side by side, with two groups under
    way.

    Args:
        buffer_bytes: how many bytes the buffers under way may take on a wire that runs ahead; a single larger one
        goes
            alone.
        finish: called with each parcel, in the order in which they were added, when the wait for it is over; it
        gives
            back the parcel's slot. On a wire that runs ahead the bytes need not be there yet: whatever is launched
            from now on finds them.
    """

    def __init__(self, buffer_bytes: int, finish: Callable[[Parcel], None]) -> None:
        ahead = runs_ahead()
        self._per_group = IN_FLIGHT if ahead else 1
        self._groups = _GROUPS if ahead else IN_FLIGHT
        self._buffer_bytes = buffer_bytes if ahead else None
        self._finish = finish
        self._open = _Group()
        self._launched: deque[_Group] = deque()

    def make_room(self, staged_bytes: int) -> None:
        """Finish parcels until one more may be under way. Call this before a buffer is taken for it.

        Args:
            staged_bytes: how many bytes of buffers it will take.
        """
        if self._buffer_bytes is not None and staged_bytes:
            if self._open.staged_bytes and self._open.staged_bytes + staged_bytes > self._buffer_bytes // _GROUPS:
                self._launch()
            while self._launched and self._staged_bytes() + staged_bytes > self._buffer_bytes:
                self._finish_oldest()
        if not self._open.parcels:
            while len(self._launched) >= self._groups:
                self._finish_oldest()

    def add(self, parcel: Parcel) -> None:
        """Launch a parcel, or keep it until its group is full."""
        self._open.parcels.append(parcel)
        if len(self._open.parcels) >= self._per_group:
            self._launch()

    def close(self) -> None:
        """Launch what is left, and finish everything."""
        if self._open.parcels:
            self._launch()
        while self._launched:
            self._finish_oldest()

    def _staged_bytes(self) -> int:
        return self._open.staged_bytes + sum(group.staged_bytes for group in self._launched)

    def _launch(self) -> None:
        group, self._open = self._open, _Group()
        group.works = launch([message for parcel in group.parcels for message in parcel.messages])
        self._launched.append(group)

    def _finish_oldest(self) -> None:
        group = self._launched.popleft()
        for work in group.works:
            work.wait()
        for parcel in group.parcels:
            self._finish(parcel)
