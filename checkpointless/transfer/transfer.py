"""Move a shard from the ranks that hold it into the storage of a rank that lost it.

All messages are point to point, in this order, between one rank to fill (D) and each of its holders (S0, S1, ...):

1. D to each S: whether it wants a digest of every tensor, because it holds some of them already.
2. Each S to D: the metadata (dtype, shape, device, digest) of the large tensors inside its non-tensor state. S0
   also sends the metadata of the shard (with keys, and with digests if D asked for them) and the skeleton of the
   non-tensor state.
3. D to each S: the tensors that it wants, the size of a bucket, and S's share of the objects' tensors.
4. The buckets of these tensors, in rounds (:mod:`checkpointless.transfer.bucket_rounds`).

The non-tensor state comes from S0. Large tensors inside it come in buckets like the others, from those holders that
have the same ones, because a callback's state may differ between ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import PendingDigests
from checkpointless.state.serialization.plain_values import Tree
from checkpointless.state.serialization.tensor_memory import dtype_name, own_device, tensor_bytes
from checkpointless.transfer.bucket_rounds import (
    OnBucket,
    Order,
    TransferError,
    checked,
    receive_buckets,
    send_buckets,
)
from checkpointless.transfer.buckets import Bucket, Shares, Slice, bucket_bytes_of, plan_buckets, stripe
from checkpointless.transfer.exchange import receive_bytes, receive_json, runs_ahead, send_bytes, send_json
from checkpointless.transfer.tensor_entry import Key, TensorEntry

MEMORY_BUDGET_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class TransferReport:
    """What a fill moved.

    Attributes:
        bytes: how many bytes of tensors arrived, those inside the non-tensor state included.
        kept: how many bytes of tensors were there already, from an earlier attempt or because they never change.
        digest: the digest of the digests of everything that arrived, hex ("" if nothing arrived).
        gb_per_s: ``bytes`` in 10^9 bytes per second of the whole fill.
    """

    bytes: int = 0
    kept: int = 0
    sources: tuple[int, ...] = ()
    seconds: float = 0.0
    fetched_again: int = 0
    digest: str = ""
    gb_per_s: float = 0.0

    @classmethod
    def of(cls, reports: Sequence[TransferReport]) -> TransferReport:
        """Return what several fills, one after the other, moved together."""
        nbytes, seconds = sum(each.bytes for each in reports), sum(each.seconds for each in reports)
        return cls(
            bytes=nbytes,
            kept=sum(each.kept for each in reports),
            sources=tuple(sorted({source for each in reports for source in each.sources})),
            seconds=seconds,
            fetched_again=sum(each.fetched_again for each in reports),
            digest="".join(each.digest for each in reports),
            gb_per_s=nbytes / seconds / 1e9 if seconds > 0 else 0.0,
        )


@dataclass(frozen=True)
class Fill:
    """One rank to fill, as one of its holders sees it."""

    destination: int
    place: int
    places: int


def send_state(
    tensors: Mapping[Key, torch.Tensor],
    objects: Tree,
    fills: Sequence[Fill],
    *,
    on_bucket: OnBucket | None = None,
) -> None:
    """Send this holder's share of the state to other ranks, all of them at once.

    A bucket that several ranks want is packed and digested once.

    Args:
        objects: the non-tensor state. The first holder's is sent; the tensors inside it are sent by all holders
            that have the same ones.
        on_bucket: called just before a bucket is sent, with the bucket's number in the sequence, the number of
            buckets and the bucket's bytes, a flat uint8 tensor, which may be a part of the state. It returns what
            to send, so that a fault on the way can be caused on purpose.

    Raises:
        StateTreeError: an object cannot travel.
        TransferError: a rank asks for what does not exist.
    """
    asked = {fill: receive_json(fill.destination)["digests"] for fill in fills}
    skeleton, inside = state_tree.split(objects)
    striped = any(fill.places > 1 for fill in fills)
    inside_entries = [
        entry.to_json() for entry in _entries({(index,): tensor for index, tensor in enumerate(inside)}, striped)
    ]
    for fill in fills:
        send_json(inside_entries, fill.destination)
        if fill.place == 0:
            send_json([entry.to_json() for entry in _entries(tensors, asked[fill])], fill.destination)
            send_bytes(skeleton, fill.destination)
    ordered = [*tensors.values(), *inside]
    plans: dict[str, list[Bucket]] = {}
    orders = [_hear_order(fill, ordered, len(tensors), plans) for fill in fills]
    send_buckets(ordered, orders, on_bucket)


def receive_state(
    sources: Sequence[int],
    allocate: Callable[[Sequence[TensorEntry]], Mapping[Key, torch.Tensor]],
    *,
    known: Mapping[Key, torch.Tensor] | None = None,
    memory_budget_bytes: int = MEMORY_BUDGET_BYTES,
) -> tuple[Tree, TransferReport]:
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
    told = _hear_metadata(sources, wants_digests=bool(known))
    room = allocate(told.entries)
    _check_room(told.entries, room)
    kept = _keep(told.entries, known or {}, room)
    missing = [index for index, entry in enumerate(told.entries) if entry.key not in kept]
    ahead = runs_ahead()
    bucket_bytes = bucket_bytes_of(memory_budget_bytes, ahead)
    for place, source in enumerate(sources):
        share = [told.alike.index(place), len(told.alike)] if place in told.alike else None
        send_json({"wanted": missing, "bucket_bytes": bucket_bytes, "objects": share}, source)
    inside = [torch.empty(entry.shape, dtype=entry.dtype, device=own_device(entry.device)) for entry in told.inside]
    arriving = [*(room[told.entries[index].key] for index in missing), *inside]
    wanted_bytes = [told.entries[index].nbytes for index in missing]
    inside_bytes = list(map(_nbytes, inside))
    shares = Shares.of(wanted_bytes, inside_bytes, bucket_bytes, len(sources), told.alike, ahead)
    digests, again = receive_buckets(sources, shares, arriving)
    seconds, nbytes = time.monotonic() - began_s, sum(map(_nbytes, arriving))
    return state_tree.join(told.skeleton, inside), TransferReport(
        bytes=nbytes,
        kept=sum(entry.nbytes for entry in told.entries if entry.key in kept),
        sources=tuple(sources),
        seconds=seconds,
        fetched_again=again,
        digest=xxhash.xxh3_64_hexdigest(json.dumps(digests).encode()) if digests else "",
        gb_per_s=nbytes / seconds / 1e9 if seconds > 0 else 0.0,
    )


# --- the holder's side ------------------------------------------------------------------------------------------


def _entries(tensors: Mapping[Key, torch.Tensor], digested: bool) -> list[TensorEntry]:
    if not digested:
        return [TensorEntry.of(key, tensor) for key, tensor in tensors.items()]
    digests = PendingDigests()
    for tensor in tensors.values():
        digests.add(tensor_bytes(tensor))
    return [
        TensorEntry.of(key, tensor, digest)
        for (key, tensor), digest in zip(tensors.items(), digests.fetch(), strict=True)
    ]


def _hear_order(fill: Fill, tensors: Sequence[torch.Tensor], count: int, plans: dict[str, list[Bucket]]) -> Order:
    """Receive what a destination wants. Destinations that want the same share a plan, and thereby their buckets.

    Args:
        tensors: the shard's ``count`` tensors, and then the tensors inside the objects.
    """
    order = receive_json(fill.destination)
    share = order["objects"]
    name = json.dumps([order["wanted"], order["bucket_bytes"], share is not None])
    if name not in plans:
        chosen = checked(order["wanted"], count)
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
    return Order(fill.destination, buckets, wanted, order["bucket_bytes"])


def _numbered(tensors: Sequence[torch.Tensor], chosen: Sequence[int], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets of the tensors with the numbers ``chosen``, in terms of these numbers."""
    return [
        tuple(Slice(chosen[part.index], part.start, part.stop) for part in bucket)
        for bucket in plan_buckets([_nbytes(tensors[index]) for index in chosen], bucket_bytes, runs_ahead())
    ]


# --- the side of the rank to fill -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Metadata:
    """What the holders say before anything moves.

    Attributes:
        alike: the places of the holders whose objects contain the same tensors.
    """

    entries: Sequence[TensorEntry]
    inside: Sequence[TensorEntry]
    skeleton: bytes
    alike: Sequence[int]


def _hear_metadata(sources: Sequence[int], wants_digests: bool) -> _Metadata:
    """Ask the holders for the metadata."""
    for source in sources:
        send_json({"digests": wants_digests}, source)
    insides = [receive_json(sources[0])]
    entries = [TensorEntry.from_json(each) for each in receive_json(sources[0])]
    skeleton = receive_bytes(sources[0])
    insides += [receive_json(source) for source in sources[1:]]
    return _Metadata(
        entries,
        [TensorEntry.from_json(each) for each in insides[0]],
        skeleton,
        [place for place, theirs in enumerate(insides) if theirs == insides[0]],
    )


def _check_room(entries: Sequence[TensorEntry], room: Mapping[Key, torch.Tensor]) -> None:
    """Raise TransferError if ``room`` lacks a tensor, or has one of another dtype or shape."""
    for entry in entries:
        if not entry.fits(room.get(entry.key)):
            raise TransferError(
                f"{entry.key}: the sender holds {dtype_name(entry.dtype)} {entry.shape}, "
                f"this rank has room for {_describe(room.get(entry.key))}"
            )


def _keep(
    entries: Sequence[TensorEntry], known: Mapping[Key, torch.Tensor], room: Mapping[Key, torch.Tensor]
) -> set[Key]:
    """Return the keys of the tensors that this rank has already, after it has put them in their place."""
    asked = [
        entry
        for entry in entries
        if entry.digest is not None and entry.key in known and entry.fits(known[entry.key])
    ]
    digests = PendingDigests()
    for entry in asked:
        digests.add(tensor_bytes(known[entry.key]))
    kept = {entry.key for entry, digest in zip(asked, digests.fetch(), strict=True) if digest == entry.digest}
    for key in kept:
        if room[key] is not known[key]:
            room[key].detach().copy_(known[key])
    return kept


# --- both sides -------------------------------------------------------------------------------------------------


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _describe(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
