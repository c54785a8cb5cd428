"""Move the buckets that were ordered, in rounds: a bucket that arrives damaged is sent again by the next holder.

Between a rank to fill (D) and each of its holders (S), all messages are point to point:

1. Each S to D, if D reads from S's memory: the addresses of its stripe of the buckets; none for one that it sends.
2. Each S to D: the other buckets, several in flight, and then the digests of all, as JSON.
3. D to each S: the damaged buckets that S is to send now, or that everything has arrived. Back to 2.

A large tensor is sent from where it lies to where it belongs; small ones share a bucket. Every bucket is digested
at the sender, while others are under way, and at the receiver where its bytes ended up. Digests on a device are
fetched once per round. What D reads from memory it reads in the first round, while S digests it. What cannot be
read after all is sent, as what arrived damaged is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from checkpointless.serialization.checksum import digest_parts
from checkpointless.serialization.pending_digests import PendingDigests
from checkpointless.serialization.tensor_memory import tensor_bytes
from checkpointless.transfer.buckets import Bucket, Shares, size_of
from checkpointless.transfer.exchange import receive_json, send_json
from checkpointless.transfer.memory_reads import BucketRead, MemoryReads
from checkpointless.transfer.staging import Staging, addresses_of, copy_of, in_place, pack, unpack
from checkpointless.transfer.window import Parcel, Window
from checkpointless.transfer.wire import Message

logger = logging.getLogger(__name__)

MAX_ROUNDS = 4

#: Called with a bucket's number in the sequence, the number of buckets, and a function that copies its bytes.
OnBucket = Callable[[int, int, Callable[[], torch.Tensor]], torch.Tensor | None]


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
        is_reader: whether the destination reads in this round what this holder has at an address.
        read: the numbers of the buckets that it reads in this round.
        digests: the digests of the buckets that were sent or read in this round.
    """

    destination: int
    buckets: list[Bucket]
    wanted: list[int]
    bucket_bytes: int
    is_reader: bool = False
    read: frozenset[int] = frozenset()
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
        for order in orders:
            _tell_addresses(tensors, order)
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
    sources: Sequence[int],
    shares: Shares,
    tensors: Sequence[torch.Tensor],
    pids: Sequence[int | None],
    reads: MemoryReads,
) -> tuple[list[int], int, int]:
    """Receive every bucket; fetch a damaged one again from the next holder.

    Args:
        sources: the global ranks of the holders, in the order of their places.
        shares: the buckets, and which holder sends which.
        tensors: the tensors to write into, which the buckets are made of.
        pids: the process of each holder whose memory is read; None for the others.
        reads: reads it.

    Returns:
        The digests of all buckets, how many buckets were fetched again, and how many bytes were read from memory.

    Raises:
        TransferError: a bucket stayed damaged, or a holder sent another number of digests than of buckets.
    """
    buckets = shares.buckets
    wanted = shares.split(range(len(buckets)), 0)
    digests: list[int | None] = [None] * len(buckets)
    readable = _hear_addresses(sources, wanted, shares, pids)
    fetched_again = 0
    for attempt in range(MAX_ROUNDS):
        for index, digest in _receive_round(sources, wanted, shares, tensors, readable, reads):
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
        for index in bad:
            readable.pop(index, None)
        if not bad:
            by_memory = sum(size_of(buckets[index]) for index in readable)
            return [digest for digest in digests if digest is not None], fetched_again, by_memory
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


def _tell_addresses(tensors: Sequence[torch.Tensor], order: Order) -> None:
    """Tell a destination that reads where the parts of each bucket are that it wants, or None if they are sent.

    They stay there, because the caller has the tensors until the destination says that everything has arrived.
    """
    order.read = frozenset()
    if not order.is_reader:
        return
    order.is_reader = False  # whatever it wants again is sent
    addresses = [addresses_of(tensors, order.buckets[index]) for index in order.wanted]
    send_json(addresses, order.destination)
    order.read = frozenset(index for index, found in zip(order.wanted, addresses) if found is not None)


def _hear_addresses(
    sources: Sequence[int], wanted: Sequence[Sequence[int]], shares: Shares, pids: Sequence[int | None]
) -> dict[int, tuple[int, list[int]]]:
    """Receive what :func:`_tell_addresses` sent.

    Returns:
        The process and the addresses of each bucket that is to be read.

    Raises:
        TransferError: a holder sent something else.
    """
    readable: dict[int, tuple[int, list[int]]] = {}
    for source, pid, indices in zip(sources, pids, wanted):
        if pid is None:
            continue
        told = receive_json(source)
        if len(told) != len(indices):
            raise TransferError(f"rank {source} sent addresses of {len(told)} buckets for {len(indices)}")
        for index, addresses in zip(indices, told):
            if addresses is None:
                continue
            if len(addresses) != len(shares.buckets[index]) or any(type(each) is not int for each in addresses):
                raise TransferError(f"rank {source} sent other addresses of bucket {index} than its parts have")
            readable[index] = pid, addresses
    return readable


def _send_round(
    tensors: Sequence[torch.Tensor],
    orders: Sequence[Order],
    on_bucket: OnBucket | None,
) -> None:
    """Send every order's buckets, in ascending order to each destination, with several in flight.

    Those that all takers read from memory are digested only.
    """
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
        replaced = None
        if on_bucket is not None:
            replaced = on_bucket(position, len(parcels), partial(copy_of, tensors, bucket))
        receivers = [order for order in takers if index not in order.read]
        if not receivers:
            # Readers may have been there already, so what stands for the bucket takes part by its digest alone.
            parts = [replaced] if replaced is not None else _parts_of(tensors, bucket)
            digests.add_known(digest_parts(parts))
            continue
        payload = in_place(tensors, bucket)
        window.make_room(0 if payload is not None else size_of(bucket))
        slot = None
        if payload is None:
            slot = staging.take(size_of(bucket))
            payload = pack(tensors, bucket, slot, staging.pinned)
        digests.add(payload)  # before sending, which then finds the bytes in the cache
        if replaced is not None:
            payload = replaced
        messages = [Message(payload, order.destination, is_sent=True) for order in receivers]
        window.add(Parcel(index, payload, messages, slot))
    window.close()
    for (_, takers), digest in zip(in_turn, digests.fetch(), strict=True):
        for order in takers:
            order.digests.append(digest)


def _parts_of(tensors: Sequence[torch.Tensor], bucket: Bucket) -> Iterator[torch.Tensor]:
    """Yield the bytes of the bucket's parts, flat uint8."""
    for part in bucket:
        yield tensor_bytes(tensors[part.index])[part.start : part.stop]


def _receive_round(
    sources: Sequence[int],
    wanted: Sequence[Sequence[int]],
    shares: Shares,
    tensors: Sequence[torch.Tensor],
    readable: Mapping[int, tuple[int, list[int]]],
    reads: MemoryReads,
) -> list[tuple[int, int | None]]:
    """Receive or read the wanted buckets of every source, and digest each where its bytes ended up.

    The digest of a bucket that could not be read is None.
    """
    incoming = sorted((index, place) for place, indices in enumerate(wanted) for index in indices)
    staging, digests = Staging(), PendingDigests()
    staged = _start_reads([index for index, _ in incoming if index in readable], shares, tensors, readable, reads)

    def finish(parcel: Parcel) -> None:
        if parcel.slot is None:
            digests.add(parcel.payload)
        else:
            unpack(tensors, shares.buckets[parcel.index], parcel.payload, digests, staging.pinned)
            staging.give_back(parcel.slot)

    window = Window(shares.bucket_bytes, finish)
    sent = [(index, place) for index, place in incoming if index not in readable]
    for index, place in sent:
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
    read = _read_staged(staged, shares, tensors, readable, reads, staging)
    staging.pinned.settle()
    read.update(reads.finish())
    received = zip((index for index, _ in sent), digests.fetch(), strict=True)
    return [*received, *read.items()]


def _start_reads(
    indices: Sequence[int],
    shares: Shares,
    tensors: Sequence[torch.Tensor],
    readable: Mapping[int, tuple[int, list[int]]],
    reads: MemoryReads,
) -> list[int]:
    """Begin to read buckets, each into the memory where it belongs; return those that need a buffer on the way."""
    staged: list[int] = []

    def straight() -> Iterator[BucketRead]:
        for index in indices:
            places = addresses_of(tensors, shares.buckets[index])
            if places is None:
                staged.append(index)
            else:
                sizes = [part.nbytes for part in shares.buckets[index]]
                yield BucketRead(index, *readable[index], places, sizes, tensors)

    reads.start(straight())
    return staged


def _read_staged(
    indices: Sequence[int],
    shares: Shares,
    tensors: Sequence[torch.Tensor],
    readable: Mapping[int, tuple[int, list[int]]],
    reads: MemoryReads,
    staging: Staging,
) -> dict[int, int | None]:
    """Read buckets through a buffer, and return their digests where their bytes ended up."""
    found: dict[int, int | None] = {}
    for index in indices:
        bucket = shares.buckets[index]
        slot = staging.take(size_of(bucket))
        landed = slot[: size_of(bucket)]
        sizes = [part.nbytes for part in bucket]
        places = [landed.data_ptr() + start for start in accumulate(sizes[:-1], initial=0)]
        found[index] = reads.fetch(BucketRead(index, *readable[index], places, sizes, landed))
        if found[index] is not None:
            digests = PendingDigests()
            unpack(tensors, bucket, landed, digests, staging.pinned)
            (found[index],) = digests.fetch()
        staging.give_back(slot)
    return found
