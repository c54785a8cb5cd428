"""Move a shard from the ranks that hold it into the storage of a rank that lost it.

All messages are point to point, in this order, between one rank to fill (D) and each of its holders (S0, S1, ...):

1. D to each S: whether it wants a digest of every tensor, because it holds some of them already.
2. Each S to D: the metadata (dtype, shape, device, digest) of the large tensors inside its non-tensor state. S0
   also sends the metadata of the shard (with keys, and with digests if D asked for them) and the skeleton of the
   non-tensor state.
3. D to each S: the tensors that it wants, the size of a bucket, and S's share of the objects' tensors.
4. Each S to D: its stripe of the buckets, several in flight, and then their digests.
5. D to each S: the damaged buckets that S is to send now, or that everything has arrived. Back to 4.

The non-tensor state comes from S0. Large tensors inside it come in buckets like the others, from those holders that
have the same ones, because a callback's state may differ between ranks.

A large tensor is sent from where it lies to where it belongs; small ones share a bucket. Every bucket is digested
at the sender, while others are under way, and at the receiver where its bytes ended up.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from checkpointless.serialization import state_tree
from checkpointless.serialization.checksum import digest_bytes, digest_parts
from checkpointless.serialization.tensor_memory import dtype_name, dtype_of, own_device, tensor_bytes
from checkpointless.transfer.buckets import PACKED_BYTES, Bucket, Shares, Slice, plan_buckets, size_of, stripe
from checkpointless.transfer.exchange import receive_bytes, send_bytes, wire_device

logger = logging.getLogger(__name__)

MEMORY_BUDGET_BYTES = 128 * 1024 * 1024
IN_FLIGHT = 8
MAX_ROUNDS = 4

Key = tuple[str | int, ...]
OnBucket = Callable[[int, int, torch.Tensor], torch.Tensor]


class TransferError(RuntimeError):
    """What arrived is not what was sent, and no holder could mend it."""


@dataclass(frozen=True)
class TensorEntry:
    """What another rank must know to make a tensor and check it.

    Attributes:
        key: the tensor's place in the state.
        dtype: the tensor's dtype.
        shape: the tensor's shape.
        device: the kind of device that the tensor lives on, ``cpu`` or ``cuda``.
        digest: the digest of the tensor's bytes, or None if nobody asked for it.
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    digest: int | None = None

    @classmethod
    def of(cls, key: Key, tensor: torch.Tensor, digest: int | None = None) -> TensorEntry:
        """Return the entry of ``tensor``."""
        return cls(key, tensor.dtype, tuple(tensor.shape), tensor.device.type, digest)

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def fits(self, tensor: torch.Tensor | None) -> bool:
        """Return whether ``tensor`` has this dtype and shape."""
        return tensor is not None and tensor.dtype == self.dtype and tuple(tensor.shape) == self.shape

    def to_json(self) -> list[Any]:
        """Return the entry as plain data."""
        return [list(self.key), dtype_name(self.dtype), list(self.shape), self.device, self.digest]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> TensorEntry:
        """Return the entry that :meth:`to_json` encoded.

        Raises:
            ValueError: the dtype is unknown.
        """
        key, dtype, shape, device, digest = data
        return cls(tuple(key), dtype_of(dtype), tuple(shape), device, digest)


@dataclass(frozen=True)
class TransferReport:
    """What a fill moved.

    Attributes:
        bytes: how many bytes of tensors arrived, those inside the non-tensor state included.
        kept: how many bytes of tensors were there already, from an earlier attempt or because they never change.
        sources: the global ranks that the state came from.
        seconds: how long the fill took, in seconds.
        fetched_again: how many buckets arrived damaged and were fetched again.
        digest: the digest of the digests of everything that arrived, hex ("" if nothing arrived).
    """

    bytes: int = 0
    kept: int = 0
    sources: tuple[int, ...] = ()
    seconds: float = 0.0
    fetched_again: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Fill:
    """One rank to fill, as one of its holders sees it.

    Attributes:
        destination: the global rank to fill.
        place: this holder's number among the holders that fill it.
        places: how many holders fill it.
    """

    destination: int
    place: int
    places: int


@dataclass
class _Order:
    """What one destination still wants from this holder."""

    destination: int
    buckets: list[Bucket]
    wanted: list[int]
    digests: list[int] = field(default_factory=list)


def bucket_bytes_of(memory_budget_bytes: int) -> int:
    """Return the size of a bucket with which the buckets in flight stay within the budget."""
    return max(1, memory_budget_bytes // IN_FLIGHT)


def send_state(
    tensors: Mapping[Key, torch.Tensor],
    objects: Any,
    fills: Sequence[Fill],
    *,
    on_bucket: OnBucket | None = None,
) -> None:
    """Send this holder's share of the state to other ranks, all of them at once.

    A bucket that several ranks want is packed and digested once.

    Args:
        tensors: the shard, in the order that it has on every holder.
        objects: the non-tensor state. The first holder's is sent; the tensors inside it are sent by all holders
            that have the same ones.
        fills: the ranks to fill.
        on_bucket: called just before a bucket is sent, with the bucket's number in the sequence, the number of
            buckets and the bucket's bytes, a flat uint8 tensor. It returns what to send, so that a fault on the way
            can be caused on purpose.

    Raises:
        StateTreeError: an object cannot travel.
        TransferError: a rank asks for what does not exist.
    """
    asked = {fill: _receive_json(fill.destination)["digests"] for fill in fills}
    skeleton, inside = state_tree.split(objects)
    striped = any(fill.places > 1 for fill in fills)
    inside_entries = [
        entry.to_json() for entry in _entries({(index,): tensor for index, tensor in enumerate(inside)}, striped)
    ]
    for fill in fills:
        _send_json(inside_entries, fill.destination)
        if fill.place == 0:
            _send_json([entry.to_json() for entry in _entries(tensors, asked[fill])], fill.destination)
            send_bytes(skeleton, fill.destination)
    ordered = [*tensors.values(), *inside]
    plans: dict[str, list[Bucket]] = {}
    orders = [_hear_order(fill, ordered, len(tensors), plans) for fill in fills]
    while orders:
        _send_buckets(ordered, orders, on_bucket)
        for order in orders:
            _send_json(order.digests, order.destination)
        waiting, orders = orders, []
        for order in waiting:
            again = _receive_json(order.destination)
            if again is not None:
                order.wanted, order.digests = _checked(again, len(order.buckets)), []
                orders.append(order)


def receive_state(
    sources: Sequence[int],
    allocate: Callable[[Sequence[TensorEntry]], Mapping[Key, torch.Tensor]],
    *,
    known: Mapping[Key, torch.Tensor] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
) -> tuple[Any, TransferReport]:
    """Receive the state from ``sources``, into storage that ``allocate`` gives.

    Args:
        sources: the global ranks of the holders, in the order of their places.
        allocate: called with the entries; returns the tensors to write into, by key, of the same dtype and shape.
        known: tensors that this rank already has; those that the holders have with the same digest are not sent.
        memory_budget_bytes: how many bytes the buckets in flight may take, here and at each holder.

    Returns:
        The non-tensor state, and a report of what was moved.

    Raises:
        TransferError: something arrived damaged and could not be mended.
    """
    began_s = time.monotonic()
    for source in sources:
        _send_json({"digests": bool(known)}, source)
    insides = [_receive_json(sources[0])]
    entries = [TensorEntry.from_json(each) for each in _receive_json(sources[0])]
    skeleton = receive_bytes(sources[0])
    insides += [_receive_json(source) for source in sources[1:]]
    alike = [place for place, theirs in enumerate(insides) if theirs == insides[0]]
    room = allocate(entries)
    for entry in entries:
        if not entry.fits(room.get(entry.key)):
            raise TransferError(
                f"{entry.key}: the sender holds {dtype_name(entry.dtype)} {entry.shape}, "
                f"this rank has room for {_describe(room.get(entry.key))}"
            )
    missing = [index for index, entry in enumerate(entries) if not _keep(entry, known or {}, room)]
    bucket_bytes = bucket_bytes_of(memory_budget_bytes)
    for place, source in enumerate(sources):
        share = [alike.index(place), len(alike)] if place in alike else None
        _send_json({"wanted": missing, "bucket_bytes": bucket_bytes, "objects": share}, source)
    inside = [
        torch.empty(entry.shape, dtype=entry.dtype, device=own_device(entry.device))
        for entry in map(TensorEntry.from_json, insides[0])
    ]
    arriving = [*(room[entries[index].key] for index in missing), *inside]
    shares = Shares.of(
        [entries[index].nbytes for index in missing], list(map(_nbytes, inside)), bucket_bytes, len(sources), alike
    )
    digests, again = _receive_buckets(sources, shares, arriving)
    received = sum(map(_nbytes, arriving))
    return state_tree.join(skeleton, inside), TransferReport(
        bytes=received,
        kept=sum(entry.nbytes for index, entry in enumerate(entries) if index not in set(missing)),
        sources=tuple(sources),
        seconds=time.monotonic() - began_s,
        fetched_again=again,
        digest=xxhash.xxh3_64_hexdigest(json.dumps(digests).encode()) if digests else "",
    )


def flip_a_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the byte in the middle of ``tensor``, which must be contiguous and not empty."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    flat[flat.numel() // 2] ^= 1


# --- the holder's side ------------------------------------------------------------------------------------------


def _entries(tensors: Mapping[Key, torch.Tensor], digested: bool) -> list[TensorEntry]:
    return [
        TensorEntry.of(key, tensor, digest_bytes(tensor_bytes(tensor)) if digested else None)
        for key, tensor in tensors.items()
    ]


def _hear_order(fill: Fill, tensors: Sequence[torch.Tensor], count: int, plans: dict[str, list[Bucket]]) -> _Order:
    """Receive what a destination wants. Destinations that want the same share a plan, and thereby their buckets.

    Args:
        fill: the destination.
        tensors: the shard's ``count`` tensors, and then the tensors inside the objects.
        count: how many tensors belong to the shard.
        plans: the plans made so far.
    """
    order = _receive_json(fill.destination)
    share = order["objects"]
    name = json.dumps([order["wanted"], order["bucket_bytes"], share is not None])
    if name not in plans:
        chosen = _checked(order["wanted"], count)
        of_shard = _numbered(tensors, chosen, order["bucket_bytes"])
        inside = list(range(count, len(tensors))) if share is not None else []
        plans[name] = of_shard + _numbered(tensors, inside, order["bucket_bytes"])
    buckets = plans[name]
    first = sum(bucket[0].index < count for bucket in buckets)
    wanted = stripe(first, fill.place, fill.places)
    if share is not None:
        place, places = share
        if not 0 <= place < places <= fill.places:
            raise TransferError(f"a rank asks for part {place} of {places}")
        wanted += [first + index for index in stripe(len(buckets) - first, place, places)]
    return _Order(fill.destination, buckets, wanted)


def _numbered(tensors: Sequence[torch.Tensor], chosen: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets of the tensors with the numbers ``chosen``, in terms of these numbers."""
    return [
        tuple(Slice(chosen[part.index], part.start, part.stop) for part in bucket)
        for bucket in plan_buckets([_nbytes(tensors[index]) for index in chosen], bucket_bytes)
    ]


def _send_buckets(
    tensors: Sequence[torch.Tensor],
    orders: Sequence[_Order],
    on_bucket: OnBucket | None,
) -> None:
    """Send every order's buckets, in ascending order to each destination, with several in flight."""
    parcels: dict[tuple[int, int], list[_Order]] = {}
    for order in orders:
        for index in order.wanted:
            parcels.setdefault((index, id(order.buckets)), []).append(order)
    staging = _Staging()
    window: deque[tuple[list[Any], torch.Tensor | None]] = deque()
    for position, ((index, _), takers) in enumerate(sorted(parcels.items(), key=lambda item: item[0])):
        if len(window) >= IN_FLIGHT:
            _finish(window.popleft(), staging)
        bucket = takers[0].buckets[index]
        payload = _in_place(tensors, bucket)
        slot = None
        if payload is None:
            slot = staging.take(size_of(bucket))
            payload = _pack(tensors, bucket, slot)
        digest = digest_bytes(payload)  # before sending, which then finds the bytes in the cache
        for order in takers:
            order.digests.append(digest)
        if on_bucket is not None:
            payload = on_bucket(position, len(parcels), payload)
        window.append(([dist.isend(payload, order.destination) for order in takers], slot))
    while window:
        _finish(window.popleft(), staging)


def _finish(sent: tuple[list[Any], torch.Tensor | None], staging: _Staging) -> None:
    works, slot = sent
    for work in works:
        work.wait()
    if slot is not None:
        staging.give_back(slot)


def _pack(tensors: Sequence[torch.Tensor], bucket: Bucket, slot: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's bytes into ``slot``, one part after the other, and return the filled part of it."""
    offset = 0
    for part in bucket:
        slot[offset : offset + part.nbytes].copy_(tensor_bytes(tensors[part.index])[part.start : part.stop])
        offset += part.nbytes
    return slot[:offset]


# --- the side of the rank to fill -------------------------------------------------------------------------------


def _keep(entry: TensorEntry, known: Mapping[Key, torch.Tensor], room: Mapping[Key, torch.Tensor]) -> bool:
    """Return whether this rank has the tensor already; if so, it is put in its place."""
    mine = known.get(entry.key)
    if mine is None or entry.digest is None or not entry.fits(mine):
        return False
    if digest_bytes(tensor_bytes(mine)) != entry.digest:
        return False
    if room[entry.key] is not mine:
        room[entry.key].detach().copy_(mine)
    return True


def _receive_buckets(
    sources: Sequence[int], shares: Shares, tensors: Sequence[torch.Tensor]
) -> tuple[list[int], int]:
    """Receive every bucket; fetch a damaged one again from the next holder.

    Returns:
        The digests of all buckets, and how many buckets were fetched again.
    """
    buckets = shares.buckets
    wanted = shares.split(range(len(buckets)), 0)
    digests = [0] * len(buckets)
    fetched_again = 0
    for attempt in range(MAX_ROUNDS):
        for index, digest in _receive_round(sources, wanted, buckets, tensors):
            digests[index] = digest
        bad: list[int] = []
        for place, source in enumerate(sources):
            theirs = _receive_json(source)
            if len(theirs) != len(wanted[place]):
                raise TransferError(f"rank {source} sent {len(theirs)} digests for {len(wanted[place])} buckets")
            bad += [index for index, digest in zip(wanted[place], theirs) if digests[index] != digest]
        wanted = shares.split(bad, attempt + 1)
        for place, source in enumerate(sources):
            _send_json(wanted[place] if bad and attempt < MAX_ROUNDS - 1 else None, source)
        if not bad:
            return digests, fetched_again
        fetched_again += len(bad)
        logger.warning("%d of %d buckets arrived damaged and are fetched again", len(bad), len(buckets))
    raise TransferError(f"{len(bad)} buckets stayed damaged after {MAX_ROUNDS} tries")


def _receive_round(
    sources: Sequence[int],
    wanted: Sequence[Sequence[int]],
    buckets: Sequence[Bucket],
    tensors: Sequence[torch.Tensor],
) -> list[tuple[int, int]]:
    """Receive the wanted buckets of every source, and digest each where its bytes ended up."""
    incoming = sorted((index, place) for place, indices in enumerate(wanted) for index in indices)
    staging = _Staging()
    window: deque[tuple[int, Any, torch.Tensor, torch.Tensor | None]] = deque()
    done: list[tuple[int, int]] = []

    def finish() -> None:
        index, work, landed, slot = window.popleft()
        work.wait()
        if slot is None:
            done.append((index, digest_bytes(landed)))
        else:
            done.append((index, _unpack(tensors, buckets[index], landed)))
            staging.give_back(slot)

    for index, place in incoming:
        if len(window) >= IN_FLIGHT:
            finish()
        landing = _in_place(tensors, buckets[index])
        slot = None
        if landing is None:
            slot = staging.take(size_of(buckets[index]))
            landing = slot[: size_of(buckets[index])]
        window.append((index, dist.irecv(landing, sources[place]), landing, slot))
    while window:
        finish()
    return done


def _unpack(tensors: Sequence[torch.Tensor], bucket: Bucket, landed: torch.Tensor) -> int:
    """Put the bucket's bytes where they belong, and return their digest (on the CPU, taken where they then are)."""
    offset = 0
    for part in bucket:
        target = tensors[part.index].detach()
        body = landed[offset : offset + part.nbytes]
        if target.is_contiguous():
            target.reshape(-1).view(torch.uint8)[part.start : part.stop].copy_(body)
        else:  # its storage has gaps: go through a contiguous copy
            whole = target.contiguous()
            whole.reshape(-1).view(torch.uint8)[part.start : part.stop].copy_(body)
            target.copy_(whole)
        offset += part.nbytes
    if landed.device.type != "cpu":
        return digest_bytes(landed)
    return digest_parts(tensor_bytes(tensors[part.index])[part.start : part.stop] for part in bucket)


# --- both sides -------------------------------------------------------------------------------------------------


class _Staging:
    """Reusable buffers for buckets that cannot be sent from, or received into, the place where they belong."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        self._free.clear()  # too small: only the buffers in flight remain, within the budget
        return torch.empty(max(nbytes, PACKED_BYTES), dtype=torch.uint8, device=wire_device())

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


def _in_place(tensors: Sequence[torch.Tensor], bucket: Bucket) -> torch.Tensor | None:
    """Return the bucket's bytes where they lie, if they are one piece on the device that the wire uses."""
    if len(bucket) != 1:
        return None
    (part,) = bucket
    tensor = tensors[part.index].detach()
    if not tensor.is_contiguous() or tensor.device.type != wire_device().type:
        return None
    return tensor.reshape(-1).view(torch.uint8)[part.start : part.stop]


def _checked(indices: Any, count: int) -> list[int]:
    """Return ``indices`` of a message after checking that they are ascending numbers below ``count``."""
    if (
        not isinstance(indices, list)
        or any(type(index) is not int or not 0 <= index < count for index in indices)
        or indices != sorted(set(indices))
    ):
        raise TransferError(f"a rank asks for what there is not: {str(indices)[:100]}")
    return indices


def _send_json(message: Any, destination: int) -> None:
    send_bytes(json.dumps(message, separators=(",", ":")).encode(), destination)


def _receive_json(source: int) -> Any:
    return json.loads(receive_bytes(source))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _describe(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
