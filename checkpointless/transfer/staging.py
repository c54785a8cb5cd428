"""The bytes of a bucket in memory: where they lie, or in a buffer that they are packed into and unpacked from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpointless.serialization.checksum import digest_bytes, digest_parts
from checkpointless.serialization.tensor_memory import tensor_bytes
from checkpointless.transfer.buckets import PACKED_BYTES, Bucket
from checkpointless.transfer.exchange import wire_device


class Staging:
    """Reusable buffers for buckets that cannot be sent from, or received into, the place where they belong."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

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
    return tensor.reshape(-1).view(torch.uint8)[part.start : part.stop]


def pack(tensors: Sequence[torch.Tensor], bucket: Bucket, slot: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's bytes into ``slot``, one part after the other, and return the filled part of it."""
    offset = 0
    for part in bucket:
        slot[offset : offset + part.nbytes].copy_(tensor_bytes(tensors[part.index])[part.start : part.stop])
        offset += part.nbytes
    return slot[:offset]


def unpack(tensors: Sequence[torch.Tensor], bucket: Bucket, landed: torch.Tensor) -> int:
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
