"""Move the buckets that were ordered, in rounds: a bucket that arrives damaged is sent again by the next holder.

Between a rank to fill (D) and each of its holders (S), all messages are point to point:

1. Each S to D: its stripe of the buckets, several in flight, and then their digests, as JSON.
2. D to each S: the damaged buckets that S is to send now, or that everything has arrived. Back to 1.

A large tensor is sent from where it lies to where it belongs; small ones share a bucket. Every bucket is digested
at the sender, while others are under way, and at the receiver where its bytes ended up. Digests on a device are
fetched once per round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from checkpointless.serialization.pending_digests import PendingDigests
from checkpointless.transfer.buckets import Bucket, Shares, size_of
from checkpointless.transfer.exchange import receive_json, send_json
from checkpointless.transfer.staging import Staging, in_place, pack, unpack
from checkpointless.transfer.window import Parcel, Window
from checkpointless.transfer.wire import Message

logger = logging.getLogger(__name__)

MAX_ROUNDS = 4

#: Called with a bucket's number in the sequence, the number of buckets and its bytes; returns what to send.
OnBucket = Callable[[int, int, torch.Tensor], torch.Tensor]


class TransferError(RuntimeError):
    """What arrived is not what was sent, and no holder could mend it."""


@dataclass
class Order:
    """What one destination still wants from this holder.

    Attributes:
        destination: the global rank.
        buckets: all buckets of the destination.
        wanted: the numbers of the buckets to send in this round, ascending.
        bucket_bytes: the largest size of a bucket in bytes, which the destination has chosen.
        digests: the digests of the buckets that were sent in this round.
    """

    destination: int
    buckets: list[Bucket]
    wanted: list[int]
    bucket_bytes: int
    digests: list[int] = field(default_factory=list)


def send_buckets(tensors: Sequence[torch.Tensor], orders: Sequence[Order], on_bucket: OnBucket | None) -> None:
    """Send every order's buckets and their digests, and the damaged ones again until every destination has all.

    Args:
        tensors: the tensors that the buckets are made of.
        orders: what each destination wants; the orders are used up.
        on_bucket: see :func:`~checkpointless.transfer.transfer.send_state`.

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
        shares: the buckets, and which holder sends which.
        tensors: the tensors to write into, which the buckets are made of.

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
    staging, digests = Staging(), PendingDigests()

    def finish(parcel: Parcel) -> None:
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
        window.add(Parcel(index, payload, messages, slot))
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
    staging, digests = Staging(), PendingDigests()

    def finish(parcel: Parcel) -> None:
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
        window.add(Parcel(index, landing, [Message(landing, sources[place], is_sent=False)], slot))
    window.close()
    staging.pinned.settle()
    return [(index, digest) for (index, _), digest in zip(incoming, digests.fetch(), strict=True)]
