"""Move the buckets that were ordered, in rounds: a bucket that arrives damaged is sent again by the next holder.

Between a rank to fill (D) and each of its holders (S), all messages are point to point:

1. Each S to D: its stripe of the buckets, several in flight, and then their digests, as JSON.
2. D to each S: the damaged buckets that S is to send now, or that everything has arrived. Back to 1.

A large tensor is sent from where it lies to where it belongs; small ones share a bucket. Every bucket is digested
at the sender, while others are under way, and at the receiver where its bytes ended up. Digests on a device are
fetched once per round.

The messages under way: launched in groups, in ascending order of their buckets, with a bounded number of groups.

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

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from checkpointless.state.serialization.digest import PendingDigests, digest_parts
from checkpointless.state.serialization.tensor_memory import flat_bytes, is_on_host, tensor_bytes
from checkpointless.transfer.buckets import IN_FLIGHT, PACKED_BYTES, Bucket, Shares, size_of
from checkpointless.transfer.exchange import Message, launch, receive_json, runs_ahead, send_json, wire_device

_GROUPS = 2  # on a wire that runs ahead: one under way, one that is packed or digested meanwhile


@dataclass
class _Parcel:
    """A bucket under way.

    Attributes:
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

    parcels: list[_Parcel] = field(default_factory=list)
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

    def __init__(self, buffer_bytes: int, finish: Callable[[_Parcel], None]) -> None:
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

    def add(self, parcel: _Parcel) -> None:
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


PINNED_BYTES = 16 * 1024 * 1024
_BUFFERS = 2
logger = logging.getLogger(__name__)
MAX_ROUNDS = 4
#: Called with a bucket's number in the sequence, the number of buckets and its bytes; returns what to send.
OnBucket = Callable[[int, int, torch.Tensor], torch.Tensor]


class TransferError(RuntimeError):
    """What arrived is not what was sent, and no holder could mend it."""


@dataclass
class Order:
    """What one destination still wants from this holder."""

    destination: int
    buckets: list[Bucket]
    wanted: list[int]
    bucket_bytes: int
    digests: list[int] = field(default_factory=list)


def send_buckets(tensors: Sequence[torch.Tensor], orders: Sequence[Order], on_bucket: OnBucket | None) -> None:
    """Send every order's buckets and their digests, and the damaged ones again until every destination has all.

    Args:
        orders: what each destination wants; the orders are used up.

    Raises:
        TransferError: a rank asks for what does not exist.
    """
    while orders:
        _send_round(tensors, orders, on_bucket)
        for order in orders:
            send_json(order.digests, order.destination)
        waiting, orders = orders, []
        for order in waiting:
            again = receive_json(order.destination)
            if again is not None:
                order.wanted, order.digests = checked(again, len(order.buckets)), []
                orders.append(order)


def receive_buckets(
    sources: Sequence[int], shares: Shares, tensors: Sequence[torch.Tensor]
) -> tuple[list[int], int]:
    """Receive every bucket; fetch a damaged one again from the next holder.

    Args:
        sources: the global ranks of the holders, in the order of their places.

    Returns:
        The digests of all buckets, and how many buckets were fetched again.

    Raises:
        TransferError: a bucket stayed damaged, or a holder sent another number of digests than of buckets.
    """
    buckets = shares.buckets
    wanted = shares.split(range(len(buckets)), 0)
    digests = [0] * len(buckets)
    fetched_again = 0
    for attempt in range(MAX_ROUNDS):
        for index, digest in _receive_round(sources, wanted, shares, tensors):
            digests[index] = digest
        bad: list[int] = []
        for place, source in enumerate(sources):
            theirs = receive_json(source)
            if len(theirs) != len(wanted[place]):
                raise TransferError(f"rank {source} sent {len(theirs)} digests for {len(wanted[place])} buckets")
            bad += [index for index, digest in zip(wanted[place], theirs) if digests[index] != digest]
        wanted = shares.split(bad, attempt + 1)
        for place, source in enumerate(sources):
            send_json(wanted[place] if bad and attempt < MAX_ROUNDS - 1 else None, source)
        if not bad:
            return digests, fetched_again
        fetched_again += len(bad)
        logger.warning("%d of %d buckets arrived damaged and are fetched again", len(bad), len(buckets))
    raise TransferError(f"{len(bad)} buckets stayed damaged after {MAX_ROUNDS} tries")


def checked(indices: object, count: int) -> list[int]:
    """Return ``indices`` of a message after checking that they are ascending numbers below ``count``.

    Raises:
        TransferError: they are something else.
    """
    if (
        not isinstance(indices, list)
        or any(type(index) is not int or not 0 <= index < count for index in indices)
        or indices != sorted(set(indices))
    ):
        raise TransferError(f"a rank asked for buckets that do not exist: {str(indices)[:100]}")
    return indices


def _send_round(
    tensors: Sequence[torch.Tensor],
    orders: Sequence[Order],
    on_bucket: OnBucket | None,
) -> None:
    """Send every order's buckets, in ascending order to each destination, with several in flight."""
    parcels: dict[tuple[int, int], list[Order]] = {}
    for order in orders:
        for index in order.wanted:
            parcels.setdefault((index, id(order.buckets)), []).append(order)
    staging, digests = _Staging(), PendingDigests()

    def finish(parcel: _Parcel) -> None:
        if parcel.slot is not None:
            staging.give_back(parcel.slot)

    window = Window(max(order.bucket_bytes for order in orders), finish)
    in_turn = sorted(parcels.items(), key=lambda item: item[0])
    for position, ((index, _), takers) in enumerate(in_turn):
        bucket = takers[0].buckets[index]
        payload = in_place(tensors, bucket)
        window.make_room(0 if payload is not None else size_of(bucket))
        slot = None
        if payload is None:
            slot = staging.take(size_of(bucket))
            payload = pack(tensors, bucket, slot, staging.pinned)
        digests.add(payload)  # before sending, which then finds the bytes in the cache
        if on_bucket is not None:
            payload = on_bucket(position, len(parcels), payload)
        messages = [Message(payload, order.destination, is_sent=True) for order in takers]
        window.add(_Parcel(index, payload, messages, slot))
    window.close()
    for (_, takers), digest in zip(in_turn, digests.fetch(), strict=True):
        for order in takers:
            order.digests.append(digest)


def _receive_round(
    sources: Sequence[int],
    wanted: Sequence[Sequence[int]],
    shares: Shares,
    tensors: Sequence[torch.Tensor],
) -> list[tuple[int, int]]:
    """Receive the wanted buckets of every source, and digest each where its bytes ended up."""
    incoming = sorted((index, place) for place, indices in enumerate(wanted) for index in indices)
    staging, digests = _Staging(), PendingDigests()

    def finish(parcel: _Parcel) -> None:
        if parcel.slot is None:
            digests.add(parcel.payload)
        else:
            unpack(tensors, shares.buckets[parcel.index], parcel.payload, digests, staging.pinned)
            staging.give_back(parcel.slot)

    window = Window(shares.bucket_bytes, finish)
    for index, place in incoming:
        bucket = shares.buckets[index]
        size = size_of(bucket)
        landing = in_place(tensors, bucket)
        window.make_room(0 if landing is not None else size)
        slot = None
        if landing is None:
            slot = staging.take(size)
            landing = slot[:size]
        window.add(_Parcel(index, landing, [Message(landing, sources[place], is_sent=False)], slot))
    window.close()
    staging.pinned.settle()
    return [(index, digest) for (index, _), digest in zip(incoming, digests.fetch(), strict=True)]


# The bytes of a bucket in memory: where they lie, or in a buffer that they are packed into and unpacked from.


class _Staging:
    """Reusable buffers for buckets that cannot be sent from, or received into, the place where they belong.

    A buffer may be taken again as soon as the wait for its message is over. On a wire that runs ahead the message
    may not be done by then, but whatever is launched to fill or to read the buffer comes after it on the device.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.pinned = _PinnedCopies()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor of at least ``nbytes`` bytes, on the device that the wire uses."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        self._free.clear()  # too small: only the buffers in flight remain, within the budget
        return torch.empty(max(nbytes, PACKED_BYTES), dtype=torch.uint8, device=wire_device())

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that :meth:`take` returned and that nobody uses any more."""
        self._free.append(buffer)


def in_place(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor | None:
    """Return the bucket's bytes where they lie, if they are one piece on the device that the wire uses."""
    if len(bucket) != 1:
        return None
    (part,) = bucket
    tensor = tensors[part.index].detach()
    if not tensor.is_contiguous() or tensor.device.type != wire_device().type:
        return None
    return flat_bytes(tensor)[part.start : part.stop]


def pack(
    tensors: Sequence[torch.Tensor], bucket: Bucket, slot: torch.Tensor, pinned: _PinnedCopies
) -> torch.Tensor:
    """Copy the bucket's bytes into ``slot``, one part after the other, and return the filled part of it."""
    offset = 0
    for part in bucket:
        source = tensor_bytes(tensors[part.index])[part.start : part.stop]
        place = slot[offset : offset + part.nbytes]
        if is_on_host(source) and not is_on_host(slot):
            pinned.to_device(place, source)
        else:
            place.copy_(source)
        offset += part.nbytes
    return slot[:offset]


def unpack(
    tensors: Sequence[torch.Tensor],
    bucket: Bucket,
    landed: torch.Tensor,
    digests: PendingDigests,
    pinned: _PinnedCopies,
) -> None:
    """Put the bucket's bytes where they belong, and digest them (on the CPU, where they then are).

    What goes through pinned memory is there when that has settled.
    """
    offset = 0
    for part in bucket:
        target = tensors[part.index].detach()
        body = landed[offset : offset + part.nbytes]
        if not target.is_contiguous():  # its storage has gaps: go through a contiguous copy
            pinned.settle()
            whole = target.contiguous()
            flat_bytes(whole)[part.start : part.stop].copy_(body)
            target.copy_(whole)
        elif is_on_host(target) and not is_on_host(landed):
            pinned.to_host(flat_bytes(target)[part.start : part.stop], body)
        else:
            flat_bytes(target)[part.start : part.stop].copy_(body)
        offset += part.nbytes
    if is_on_host(landed):
        digests.add_known(
            digest_parts(tensor_bytes(tensors[part.index])[part.start : part.stop] for part in bucket)
        )
    else:
        digests.add(landed)


# --- Copies between host and device through pinned memory ---------------------------------------------------------


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Record everything that was launched so far."""

    def synchronize(self) -> None:
        """Wait until what was recorded is done, without the interpreter lock."""


class _Pinned:
    """A buffer, and what the host has to wait for, and then to do, before it is used again."""

    def __init__(self, memory: torch.Tensor, event: Event) -> None:
        self.memory, self._event = memory, event
        self._is_used = False
        self._target: torch.Tensor | None = None

    def launched(self, target: torch.Tensor | None = None) -> None:
        """Note that the device uses it until what was launched is done; then ``target`` takes what it has."""
        self._event.record()
        self._is_used, self._target = True, target

    def settle(self) -> None:
        """Wait for the device, and give the bytes to their target."""
        if self._is_used:
            self._event.synchronize()
        if self._target is not None:
            self._target.copy_(self.memory[: self._target.numel()])
        self._is_used, self._target = False, None


class _PinnedCopies:
    """Copies bytes through two pinned buffers in turn: the host uses one while the device uses the other.

    Args:
        allocate: makes a buffer; default: pinned memory.
        make_event: makes an event; default: of CUDA's.
        copy: launches a copy from the second of two tensors to the first.
    """

    def __init__(
        self,
        nbytes: int = PINNED_BYTES,
        allocate: Callable[[int], torch.Tensor] | None = None,
        make_event: Callable[[], Event] | None = None,
        copy: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    ) -> None:
        self._nbytes = nbytes
        self._allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._make_event = make_event or (lambda: torch.cuda.Event(blocking=True))
        self._copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
        self._buffers: deque[_Pinned] = deque()

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of ``source``, on the host, to ``target``, both flat uint8; ``source`` may then change."""
        for start, pinned in self._pieces(source.numel()):
            piece = source[start : start + self._nbytes]
            pinned.memory[: piece.numel()].copy_(piece)
            self._copy(target[start : start + piece.numel()], pinned.memory[: piece.numel()])
            pinned.launched()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of ``source`` to ``target``, on the host, both flat uint8.

        It is there after :meth:`settle`.
        """
        for start, pinned in self._pieces(source.numel()):
            piece = source[start : start + self._nbytes]
            self._copy(pinned.memory[: piece.numel()], piece)
            pinned.launched(target[start : start + piece.numel()])

    def settle(self) -> None:
        """Wait for all copies, those to the host in the order of their launch."""
        for pinned in self._buffers:
            pinned.settle()

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, _Pinned]]:
        for start in range(0, nbytes, self._nbytes):
            if len(self._buffers) < _BUFFERS:
                self._buffers.append(_Pinned(self._allocate(self._nbytes), self._make_event()))
            else:
                self._buffers.rotate(-1)  # the oldest one comes last
                self._buffers[-1].settle()
            yield start, self._buffers[-1]
