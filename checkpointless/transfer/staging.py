"""The bytes of a bucket in memory: where they lie, or in a buffer that they are packed into and unpacked from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpointless.serialization.checksum import digest_parts
from checkpointless.serialization.pending_digests import PendingDigests
from checkpointless.serialization.tensor_memory import flat_bytes, is_on_host, tensor_bytes
from checkpointless.transfer.buckets import PACKED_BYTES, Bucket
from checkpointless.transfer.pinned_copies import PinnedCopies
from checkpointless.transfer.wire import wire_device


class Staging:
    """Reusable buffers for buckets that cannot be sent from, or received into, the place where they belong.

    A buffer may be taken again as soon as the wait for its message is over. On a wire that runs ahead the message
    may not be done by then, but whatever is launched to fill or to read the buffer comes after it on the device.

    Attributes:
        pinned: copies between buffers on a device and tensors on the host.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.pinned = PinnedCopies()

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


def pack(tensors: Sequence[torch.Tensor], bucket: Bucket, slot: torch.Tensor, pinned: PinnedCopies) -> torch.Tensor:
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
    pinned: PinnedCopies,
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
