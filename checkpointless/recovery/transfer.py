"""Move a shard from the ranks that hold it into the storage of a rank that lost it.

One message of metadata (key, dtype, shape, digest) and the non-tensor state, then flat byte buckets, several in
flight, striped over all holders. Every bucket is checked on arrival and fetched again, from the next holder, if its
digest is wrong; every tensor is checked again where it ended up.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.recovery import state_tree
from checkpointless.recovery.checksum import MemoryChecksumManager, digest_bytes
from checkpointless.recovery.exchange import receive_bytes, send_bytes, wire_device
from checkpointless.recovery.state_tree import dtype_name, dtype_of, tensor_bytes

logger = logging.getLogger(__name__)

BUCKET_BYTES = 32 * 1024 * 1024
IN_FLIGHT = 2
MAX_ROUNDS = 4
_DIGEST_BYTES = 8

Key = tuple[str | int, ...]


class TransferError(RuntimeError):
    """What arrived is not what was sent, and no holder could mend it."""


@dataclass(frozen=True)
class TensorEntry:
    """What a tensor needs to be made and checked somewhere else.

    Attributes:
        key: its place in the state.
        dtype: its dtype.
        shape: its shape.
        device: ``cpu`` or ``cuda``: the kind of device it lives on.
        digest: digest of its bytes (xxh3-64).
    """

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    digest: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Slice:
    """Bytes ``start`` to ``stop`` of the tensor with number ``index``."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class TransferReport:
    """What a fill moved.

    Attributes:
        nbytes: bytes of tensors.
        sources: the ranks they came from.
        seconds: how long it took.
        fetched_again: buckets whose first copy was wrong.
    """

    nbytes: int
    sources: tuple[int, ...]
    seconds: float
    fetched_again: int


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[tuple[Slice, ...]]:
    """Cut tensors of ``sizes`` bytes into buckets of at most ``bucket_bytes``, in order; empty ones need none."""
    buckets: list[tuple[Slice, ...]] = []
    current: list[Slice] = []
    room = bucket_bytes
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            length = min(room, size - start)
            current.append(Slice(index, start, start + length))
            start += length
            room -= length
            if room == 0:
                buckets.append(tuple(current))
                current, room = [], bucket_bytes
    if current:
        buckets.append(tuple(current))
    return buckets


def send_state(
    tensors: Mapping[Key, torch.Tensor], objects: Any, destination: int, *, place: int, places: int
) -> None:
    """Be one of the holders that fill rank ``destination``.

    Args:
        tensors: the shard, in the order that every holder has it in.
        objects: the non-tensor state; only the first holder's is sent.
        destination: global rank.
        place: this holder's number among the ``places`` holders.
        places: how many holders send.

    Raises:
        StateTreeError: an object cannot travel.
    """
    flats = [tensor_bytes(tensor) for tensor in tensors.values()]
    if place == 0:
        metadata = {
            "entries": [
                [list(key), dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type, digest_bytes(flat)]
                for (key, tensor), flat in zip(tensors.items(), flats)
            ],
            "bucket_bytes": BUCKET_BYTES,
        }
        send_bytes(json.dumps(metadata, separators=(",", ":")).encode(), destination)
        send_bytes(state_tree.dumps(objects), destination)
    buckets = plan_buckets([flat.numel() for flat in flats], BUCKET_BYTES)
    wanted = [index for index in range(len(buckets)) if index % places == place]
    while True:
        window: list[tuple[Any, torch.Tensor]] = []
        for index in wanted:
            packed = _pack(flats, buckets[index])
            window.append((dist.isend(packed, destination), packed))
            if len(window) >= IN_FLIGHT:
                window.pop(0)[0].wait()
        for work, _ in window:
            work.wait()
        answer = json.loads(receive_bytes(destination))
        if answer is None:  # everything has arrived
            return
        wanted = answer


def receive_state(
    sources: Sequence[int], allocate: Callable[[Sequence[TensorEntry]], Mapping[Key, torch.Tensor]]
) -> tuple[Any, TransferReport]:
    """Be filled by ``sources``.

    Args:
        sources: global ranks of the holders, in the order that they were given their places in.
        allocate: given the entries, returns the tensors to write into, by key, of the same dtype and shape.

    Returns:
        The non-tensor state, and what was moved.

    Raises:
        TransferError: something arrived damaged and could not be mended.
    """
    started_s = time.monotonic()
    metadata = json.loads(receive_bytes(sources[0]))
    entries = [
        TensorEntry(tuple(key), dtype_of(dtype), tuple(shape), device, digest)
        for key, dtype, shape, device, digest in metadata["entries"]
    ]
    objects = state_tree.loads(receive_bytes(sources[0]))
    destination = allocate(entries)
    for entry in entries:
        found = destination.get(entry.key)
        if found is None or found.dtype != entry.dtype or tuple(found.shape) != entry.shape:
            raise TransferError(f"{entry.key}: the sender holds {entry}, this rank has room for {_describe(found)}")
    buckets = plan_buckets([entry.nbytes for entry in entries], metadata["bucket_bytes"])
    again = _receive_buckets(sources, buckets, [destination[entry.key] for entry in entries])
    _verify(entries, destination)
    return objects, TransferReport(
        nbytes=sum(entry.nbytes for entry in entries),
        sources=tuple(sources),
        seconds=time.monotonic() - started_s,
        fetched_again=again,
    )


def _receive_buckets(
    sources: Sequence[int], buckets: list[tuple[Slice, ...]], tensors: Sequence[torch.Tensor]
) -> int:
    """Receive every bucket, again from the next holder if it is wrong. Returns how many were fetched again."""
    device = wire_device()
    requests = {
        place: [index for index in range(len(buckets)) if index % len(sources) == place]
        for place in range(len(sources))
    }
    fetched_again = 0
    for attempt in range(MAX_ROUNDS):
        bad: list[int] = []
        pending: list[tuple[int, Any, torch.Tensor]] = []
        order = sorted(
            (position, place, index) for place, wanted in requests.items() for position, index in enumerate(wanted)
        )
        for _, place, index in order:
            buffer = torch.empty(_size(buckets[index]) + _DIGEST_BYTES, dtype=torch.uint8, device=device)
            pending.append((index, dist.irecv(buffer, sources[place]), buffer))
            if len(pending) >= IN_FLIGHT * len(sources):
                bad += _unpack(buckets, tensors, pending.pop(0))
        for waiting in pending:
            bad += _unpack(buckets, tensors, waiting)
        if bad:
            logger.warning("%d buckets arrived damaged and are fetched again", len(bad))
        fetched_again += len(bad)
        places = len(sources)
        requests = {
            place: [each for each in bad if (each + attempt + 1) % places == place] for place in range(places)
        }
        for place, source in enumerate(sources):
            send_bytes(json.dumps(requests[place] if bad else None).encode(), source)
        if not bad:
            return fetched_again
    raise TransferError(f"{len(bad)} buckets stayed damaged after {MAX_ROUNDS} tries")


def _pack(flats: Sequence[torch.Tensor], bucket: tuple[Slice, ...]) -> torch.Tensor:
    """The bucket's bytes on the wire's device, followed by their digest."""
    size = _size(bucket)
    packed = torch.empty(size + _DIGEST_BYTES, dtype=torch.uint8, device=wire_device())
    offset = 0
    for part in bucket:
        length = part.stop - part.start
        packed[offset : offset + length].copy_(flats[part.index][part.start : part.stop])
        offset += length
    packed[size:].copy_(_digest_tensor(packed[:size]))
    return packed


def _unpack(
    buckets: list[tuple[Slice, ...]], tensors: Sequence[torch.Tensor], waiting: tuple[int, Any, torch.Tensor]
) -> list[int]:
    """Wait for one bucket and put its bytes where they belong. Returns its index in a list if it is wrong."""
    index, work, buffer = waiting
    work.wait()
    body = buffer[:-_DIGEST_BYTES]
    if not torch.equal(buffer[-_DIGEST_BYTES:].cpu(), _digest_tensor(body)):
        return [index]
    offset = 0
    for part in buckets[index]:
        length = part.stop - part.start
        target = tensors[part.index]
        if target.is_contiguous():
            target.detach().reshape(-1).view(torch.uint8)[part.start : part.stop].copy_(
                body[offset : offset + length]
            )
        else:
            _write_strided(target, part, body[offset : offset + length])
        offset += length
    return []


def _write_strided(target: torch.Tensor, part: Slice, body: torch.Tensor) -> None:
    """Write bytes into a tensor whose storage has gaps, through a contiguous copy of it."""
    whole = target.detach().contiguous()
    whole.reshape(-1).view(torch.uint8)[part.start : part.stop].copy_(body)
    target.detach().copy_(whole)


def _verify(entries: Sequence[TensorEntry], tensors: Mapping[Key, torch.Tensor]) -> None:
    checksums = MemoryChecksumManager()
    for entry in entries:
        if checksums.digest(tensors[entry.key]) != entry.digest:
            raise TransferError(f"{entry.key} is not what its sender holds")


def _digest_tensor(body: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(digest_bytes(body).to_bytes(_DIGEST_BYTES, "little")), dtype=torch.uint8)


def _size(bucket: tuple[Slice, ...]) -> int:
    return sum(part.stop - part.start for part in bucket)


def _describe(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
