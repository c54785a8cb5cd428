"""Move a shard from the ranks that hold it into the storage of a rank that lost it.

All messages are point to point, in this order, between one rank to fill (D) and each of its holders (S0, S1, ...):

1. D to each S: whether it wants a digest of every tensor, because it holds some of them already.
2. S0 to D: the metadata of the shard (keys, dtype, shape, device, and digests if D asked for them), the metadata of
   the large tensors inside its non-tensor state, and the skeleton of that state.
3. D to each S: the tensors that it wants, and the size of a bucket.
4. Each S to D: its stripe of the buckets, several in flight, and then their digests. If a bucket is damaged, D
   raises. It is sent again in the next generation, in which D has all that arrived whole.

The non-tensor state, with the large tensors inside it, comes from S0: a callback's state may differ between ranks.

A large tensor is sent from where it lies to where it belongs; small ones share a bucket. Every bucket is digested
at the sender, while others are under way, and at the receiver where its bytes ended up. Digests on a device are
fetched once.

Messages under way are launched in groups, in ascending order of their buckets, with a bounded number of groups.
Groups do not wait for each other in a circle, although the ranks cut them differently: on NCCL a group is done
when all its messages are, and the next one of the same rank begins then. Both ends go through the buckets in
ascending order, and a rank to fill wants each bucket from one holder. Take the smallest bucket of which
any message is not done. Each rank to fill that still waits for it has it in its present group, because all smaller
ones are done. So has each holder its first message of that bucket. This message is in the present group at both its
ends, and is done, because NCCL does the messages of a group side by side. Thus there is always a message that can
be done. Between two ranks, messages match in the order of their launch, which is that of the buckets at both ends,
whatever the groups. The messages before and after the buckets are in the order of the protocol at all ranks, each
waiting for the last one.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import PendingDigests, digest_each
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.state.serialization.tensor_memory import (
    dtype_name,
    flat_bytes,
    is_on_host,
    own_device,
    tensor_bytes,
)
from checkpointless.transfer.exchange import Message, launch, receive_bytes, runs_ahead, send_bytes, wire_device
from checkpointless.transfer.tensor_entry import Key, TensorEntry

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed

# --- The plan: how bytes are cut into buckets; pure functions of the tensors' sizes, equal at both ends -----------

# Size of a bucket that small tensors share: a smaller one means more messages, a larger one leaves the caches.
PACKED_BYTES = 4 * 1024 * 1024
#: How many buckets are under way at once.
IN_FLIGHT = 8
_WHOLE = 2  # a tensor of at least 1 / _WHOLE of a shared bucket is sent from where it lies, and not packed


@dataclass(frozen=True)
class _Slice:
    """Bytes ``start`` to ``stop`` (exclusive) of the tensor with number ``index``."""

    index: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


Bucket = tuple[_Slice, ...]


def _bucket_bytes_of(memory_budget_bytes: int) -> int:
    """Return the size of a bucket with which the buffers of the buckets in flight stay within the budget."""
    return max(1, memory_budget_bytes // IN_FLIGHT)


def _shared_bytes(bucket_bytes: int) -> int:
    return min(PACKED_BYTES, bucket_bytes)


def _plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Cut tensors into buckets: a large one gets some of its own, sent without a copy; small ones share."""
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing")
    room = _shared_bytes(bucket_bytes)
    buckets: list[Bucket] = []
    shared: list[_Slice] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size * _WHOLE >= room:
            buckets += [
                (_Slice(index, start, min(start + bucket_bytes, size)),) for start in range(0, size, bucket_bytes)
            ]
        elif size:
            if filled + size > room:
                buckets.append(tuple(shared))
                shared, filled = [], 0
            shared.append(_Slice(index, 0, size))
            filled += size
    if shared:
        buckets.append(tuple(shared))
    return buckets


def _size_of(bucket: Bucket) -> int:
    return sum(part.nbytes for part in bucket)


@dataclass(frozen=True)
class _Plan:
    """How tensors travel to one rank, alike at both ends: the buckets, and which each holder sends, ascending."""

    tensors: Sequence[torch.Tensor]
    buckets: list[Bucket]
    by_place: list[list[int]]
    bucket_bytes: int

    @classmethod
    def of(
        cls, shard: Sequence[torch.Tensor], inside: Sequence[torch.Tensor], bucket_bytes: int, places: int
    ) -> _Plan:
        """Plan for a shard, which all holders send, and tensors inside the objects, which the first one sends."""
        buckets = _plan_buckets([tensor.nbytes for tensor in shard], bucket_bytes)
        by_place = [[*range(place, len(buckets), places)] for place in range(places)]
        for bucket in _plan_buckets([tensor.nbytes for tensor in inside], bucket_bytes):
            by_place[0].append(len(buckets))
            buckets.append(tuple(_Slice(len(shard) + part.index, part.start, part.stop) for part in bucket))
        return cls([*shard, *inside], buckets, by_place, bucket_bytes)


_GROUPS = 2  # on a wire that runs ahead: one under way, one that is packed or digested meanwhile


@dataclass
class _Parcel:
    """A bucket under way to or from several ranks: its bytes or room, and the buffer that it is packed in."""

    index: int
    payload: torch.Tensor
    messages: list[Message]
    slot: torch.Tensor | None


class _Window:
    """Launches parcels and finishes the oldest ones when too much is under way.

    On the CPU each is launched at once; on a wire that runs ahead in groups, done side by side, one packed while
    another is under way. ``finish`` is called in the order of :meth:`add`, when a wait is over; its bytes need not
    be there yet on such a wire, but whatever is launched from then on finds them.
    """

    def __init__(self, finish: Callable[[_Parcel], None]) -> None:
        self._per_group = IN_FLIGHT // _GROUPS if runs_ahead() else 1
        self._finish = finish
        self._open: list[_Parcel] = []
        self._launched: deque[tuple[list[_Parcel], list[dist.Work]]] = deque()

    def make_room(self) -> None:
        """Finish parcels until one more may be under way. Call this before a buffer is taken for it."""
        while not self._open and len(self._launched) * self._per_group >= IN_FLIGHT:
            self._finish_oldest()

    def add(self, parcel: _Parcel) -> None:
        """Launch a parcel, or keep it until its group is full."""
        self._open.append(parcel)
        if len(self._open) >= self._per_group:
            self._launch()

    def close(self) -> None:
        if self._open:
            self._launch()
        while self._launched:
            self._finish_oldest()

    def _launch(self) -> None:
        group, self._open = self._open, []
        self._launched.append((group, launch([message for parcel in group for message in parcel.messages])))

    def _finish_oldest(self) -> None:
        group, works = self._launched.popleft()
        for work in works:
            work.wait()
        for parcel in group:
            self._finish(parcel)


#: Called with a bucket's number in the sequence, the number of buckets and its bytes; returns what to send.
OnBucket = Callable[[int, int, torch.Tensor], torch.Tensor]


class TransferError(RuntimeError):
    """What arrived is not what was sent."""


class _Order(NamedTuple):
    """What one destination wants from this holder."""

    destination: int
    plan: _Plan
    wanted: Sequence[int]


def _receive_buckets(sources: Sequence[int], plan: _Plan) -> list[int]:
    """Receive every bucket, and return their digests; raise ``TransferError`` if one arrived damaged."""
    arrived = _receive_stripes(sources, plan)
    damaged = 0
    for source, mine in zip(sources, plan.by_place):
        theirs = _receive_json(source)
        if len(theirs) != len(mine):
            raise TransferError(f"rank {source} sent {len(theirs)} digests for {len(mine)} buckets")
        damaged += sum(arrived[index] != digest for index, digest in zip(mine, theirs))
    if damaged:
        raise TransferError(f"{damaged} of {len(arrived)} buckets arrived damaged from ranks {list(sources)}")
    return arrived


def _checked(indices: object, count: int) -> list[int]:
    """Return ``indices`` of a message after checking that they are ascending numbers below ``count``."""
    if (
        not isinstance(indices, list)
        or any(type(index) is not int or not 0 <= index < count for index in indices)
        or indices != sorted(set(indices))
    ):
        raise TransferError(f"a rank asked for buckets that do not exist: {str(indices)[:100]}")
    return indices


def _send_buckets(orders: Sequence[_Order], on_bucket: OnBucket | None) -> None:
    """Send every order's buckets, in ascending order to each destination, with several in flight; then digests."""
    parcels: dict[tuple[int, int], list[_Order]] = defaultdict(list)
    for order in orders:
        for index in order.wanted:
            parcels[index, id(order.plan)].append(order)
    staging, digests = _Staging([order.plan for order in orders]), PendingDigests()

    def finish(parcel: _Parcel) -> None:
        if parcel.slot is not None:
            staging.give_back(parcel.slot)

    window = _Window(finish)
    in_turn = sorted(parcels)
    for position, name in enumerate(in_turn):
        plan, takers = parcels[name][0].plan, [order.destination for order in parcels[name]]
        bucket = plan.buckets[name[0]]
        payload = _in_place(plan.tensors, bucket)
        window.make_room()
        slot = None
        if payload is None:
            slot = staging.take(_size_of(bucket))
            payload = _pack(plan.tensors, bucket, slot)
        digests.add(payload)  # before sending, which then finds the bytes in the cache
        if on_bucket is not None:
            payload = on_bucket(position, len(parcels), payload)
        messages: list[Message] = [(dist.isend, payload, destination) for destination in takers]
        window.add(_Parcel(name[0], payload, messages, slot))
    window.close()
    found = dict(zip(in_turn, digests.fetch(), strict=True))
    for order in orders:
        _send_json([found[index, id(order.plan)] for index in order.wanted], order.destination)


def _receive_stripes(sources: Sequence[int], plan: _Plan) -> list[int]:
    """Receive the buckets of every source, and return the digest of each, computed where its bytes ended up."""
    sender = {index: source for source, indices in zip(sources, plan.by_place) for index in indices}
    staging, digests = _Staging([plan]), PendingDigests()

    def finish(parcel: _Parcel) -> None:
        if parcel.slot is None:
            digests.add(parcel.payload)
        else:
            _unpack(plan.tensors, plan.buckets[parcel.index], parcel.payload, digests)
            staging.give_back(parcel.slot)

    window = _Window(finish)
    for index, bucket in enumerate(plan.buckets):
        size = _size_of(bucket)
        landing = _in_place(plan.tensors, bucket)
        window.make_room()
        slot = None
        if landing is None:
            slot = staging.take(size)
            landing = slot[:size]
        window.add(_Parcel(index, landing, [(dist.irecv, landing, sender[index])], slot))
    window.close()
    return digests.fetch()


# The bytes of a bucket in memory: where they lie, or in a buffer that they are packed into and unpacked from.


class _Staging:
    """Reusable buffers for buckets not sent from, or received into, their place.

    One may be taken again as soon as the wait for its message is over: what is launched next comes after it.
    """

    def __init__(self, plans: Sequence[_Plan]) -> None:
        self._free: list[torch.Tensor] = []
        self._least = max((_shared_bytes(plan.bucket_bytes) for plan in plans), default=1)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor of at least ``nbytes`` bytes, on the device that the wire uses."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        self._free.clear()  # too small: only the buffers in flight remain, within the budget
        return torch.empty(max(nbytes, self._least), dtype=torch.uint8, device=wire_device())

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that :meth:`take` returned and that nobody uses any more."""
        self._free.append(buffer)


def _in_place(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor | None:
    """Return the bucket's bytes where they lie, if they are one piece on the device that the wire uses."""
    if len(bucket) != 1:
        return None
    (part,) = bucket
    tensor = tensors[part.index].detach()
    if not tensor.is_contiguous() or tensor.device.type != wire_device().type:
        return None
    return flat_bytes(tensor)[part.start : part.stop]


def _pack(tensors: Sequence[torch.Tensor], bucket: Bucket, slot: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's bytes into ``slot``, one part after the other, and return the filled part of it."""
    offset = 0
    for part in bucket:
        source = tensor_bytes(tensors[part.index])[part.start : part.stop]
        slot[offset : offset + part.nbytes].copy_(source)
        offset += part.nbytes
    return slot[:offset]


def _unpack(tensors: Sequence[torch.Tensor], bucket: Bucket, landed: torch.Tensor, digests: PendingDigests) -> None:
    """Put the bucket's bytes where they belong, and digest them (on the CPU, where they then are)."""
    offset = 0
    for part in bucket:
        target = tensors[part.index].detach()
        body = landed[offset : offset + part.nbytes]
        if not target.is_contiguous():  # its storage has gaps: go through a contiguous copy
            whole = target.contiguous()
            flat_bytes(whole)[part.start : part.stop].copy_(body)
            target.copy_(whole)
        else:
            flat_bytes(target)[part.start : part.stop].copy_(body)
        offset += part.nbytes
    if is_on_host(landed):
        digests.add_parts(tensor_bytes(tensors[part.index])[part.start : part.stop] for part in bucket)
    else:
        digests.add(landed)


# --- Fills -------------------------------------------------------------------------------------------------------

MEMORY_BUDGET_BYTES = 128 * 1024 * 1024


@dataclass
class TransferReport:
    """What a fill moved: bytes arrived, and ``kept``; a digest of all digests; ``bytes`` in 10^9 per second."""

    bytes: int = 0
    kept: int = 0
    sources: tuple[int, ...] = ()
    seconds: float = 0.0
    digest: str = ""
    gb_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.gb_per_s = self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @classmethod
    def of(cls, reports: Sequence[TransferReport]) -> TransferReport:
        return cls(
            bytes=sum(each.bytes for each in reports),
            kept=sum(each.kept for each in reports),
            sources=tuple(sorted({source for each in reports for source in each.sources})),
            seconds=sum(each.seconds for each in reports),
            digest="".join(each.digest for each in reports),
        )


@dataclass(frozen=True)
class Fill:
    """One rank to fill, as one of its holders sees it."""

    destination: int
    place: int
    places: int


def send_state(
    tensors: Mapping[Key, torch.Tensor], objects: Tree, fills: Sequence[Fill], *, on_bucket: OnBucket | None = None
) -> None:
    """Send this holder's share to other ranks at once; a bucket that several want is packed and digested once.

    ``on_bucket`` is called before each, to cause faults on purpose. ``StateTreeError`` if an object cannot travel,
    ``TransferError`` if a rank asks for what does not exist.
    """
    asked = {fill: _receive_json(fill.destination)["digests"] for fill in fills}
    skeleton, inside = state_tree.split(objects)
    of_objects = [TensorEntry.of((index,), tensor).to_json() for index, tensor in enumerate(inside)]
    for fill in fills:
        if fill.place == 0:
            digests = digest_each(tensors) if asked[fill] else {}
            of_shard = [TensorEntry.of(key, each, digests.get(key)).to_json() for key, each in tensors.items()]
            _send_json({"shard": of_shard, "objects": of_objects}, fill.destination)
            send_bytes(skeleton, fill.destination)
    plans: dict[str, _Plan] = {}
    orders = [_hear_order(fill, list(tensors.values()), inside, plans) for fill in fills]
    _send_buckets(orders, on_bucket)


def receive_state(
    sources: Sequence[int],
    allocate: Callable[[Sequence[TensorEntry]], Mapping[Key, torch.Tensor]],
    *,
    known: Mapping[Key, torch.Tensor] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
) -> tuple[Tree, TransferReport]:
    """Receive the state from ``sources``; return the non-tensor state, and what was moved.

    ``allocate`` returns the tensors to write into for entries. What is ``known`` with the same digest is not sent.
    Buckets in flight take ``memory_budget_bytes``, here and at each holder. ``TransferError``: damage.
    """
    began_s = time.monotonic()
    for source in sources:
        _send_json({"digests": bool(known)}, source)
    told = _receive_json(sources[0])
    entries, of_objects = (list(map(TensorEntry.from_json, told[name])) for name in ("shard", "objects"))
    skeleton = receive_bytes(sources[0])
    room = allocate(entries)
    _check_room(entries, room)
    kept = _keep(entries, known or {}, room)
    missing = [index for index, entry in enumerate(entries) if entry.key not in kept]
    bucket_bytes = _bucket_bytes_of(memory_budget_bytes)
    for source in sources:
        _send_json({"wanted": missing, "bucket_bytes": bucket_bytes}, source)
    inside = [torch.empty(entry.shape, dtype=entry.dtype, device=own_device(entry.device)) for entry in of_objects]
    plan = _Plan.of([room[entries[index].key] for index in missing], inside, bucket_bytes, len(sources))
    digests = _receive_buckets(sources, plan)
    return state_tree.join(skeleton, inside), TransferReport(
        bytes=sum(tensor.nbytes for tensor in plan.tensors),
        kept=sum(entry.nbytes for entry in entries if entry.key in kept),
        sources=tuple(sources),
        seconds=time.monotonic() - began_s,
        digest=xxhash.xxh3_64_hexdigest(json.dumps(digests).encode()) if digests else "",
    )


# --- the holder's side ------------------------------------------------------------------------------------------


def _hear_order(
    fill: Fill, shard: Sequence[torch.Tensor], inside: Sequence[torch.Tensor], plans: dict[str, _Plan]
) -> _Order:
    """Receive what a destination wants. Destinations that want the same share a plan, and thereby their buckets."""
    told = _receive_json(fill.destination)
    name = json.dumps([told["wanted"], told["bucket_bytes"], fill.places])
    if name not in plans:
        chosen = [shard[index] for index in _checked(told["wanted"], len(shard))]
        plans[name] = _Plan.of(chosen, inside, told["bucket_bytes"], fill.places)
    return _Order(fill.destination, plans[name], plans[name].by_place[fill.place])


# --- the side of the rank to fill -------------------------------------------------------------------------------


def _check_room(entries: Sequence[TensorEntry], room: Mapping[Key, torch.Tensor]) -> None:
    for entry in entries:
        mine = room.get(entry.key)
        if not entry.fits(mine):
            there = "nothing" if mine is None else f"{dtype_name(mine.dtype)} {tuple(mine.shape)}"
            raise TransferError(
                f"{entry.key}: the sender holds {dtype_name(entry.dtype)} {entry.shape}, "
                f"this rank has room for {there}"
            )


def _keep(
    entries: Sequence[TensorEntry], known: Mapping[Key, torch.Tensor], room: Mapping[Key, torch.Tensor]
) -> set[Key]:
    """Return the keys of the tensors that this rank has already, after it has put them in their place."""
    asked = {
        entry.key: entry.digest
        for entry in entries
        if entry.digest is not None and entry.key in known and entry.fits(known[entry.key])
    }
    digests = digest_each({key: known[key] for key in asked})
    kept = {key for key, digest in asked.items() if digests[key] == digest}
    for key in kept:
        if room[key] is not known[key]:
            room[key].detach().copy_(known[key])
    return kept


# --- both sides -------------------------------------------------------------------------------------------------


def _send_json(message: Json, destination: int) -> None:
    send_bytes(json.dumps(message, separators=(",", ":")).encode(), destination)


def _receive_json(source: int) -> Parsed:
    return json.loads(receive_bytes(source))
