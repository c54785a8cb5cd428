"""Page-locked host memory for what is moved away from a device, used again at each recovery."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkpointless.replication.host_memory import lock_pages
from checkpointless.transfer.tensor_entry import Key

_ALIGNMENT = 256  # bytes; enough for each dtype, and for copies at full speed


class HostMemory:
    """Buffers of page-locked memory that are never given back, because locking pages takes long.

    torch's own pinned memory rounds each tensor up to a power of two; here all tensors share one buffer.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copies(self, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Copy the tensors that lie on a device to the host, and wait until they are there.

        Args:
            tensors: the tensors, all of those that lie in this memory already among them: the others overwrite
                what else was copied before.

        Returns:
            All of the tensors by their keys, contiguous copies in the place of those that lie on a device. Tensors
            without a dimension stay where they are.
        """
        # Numbers stay: where they lie tells an optimizer which kernel to use, and they take no room.
        moved = {key: tensor for key, tensor in tensors.items() if tensor.dim() and not _is_on_host(tensor)}
        sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in moved.items()}
        used = {tensor.untyped_storage().data_ptr() for key, tensor in tensors.items() if key not in moved}
        buffer = self._buffer(sum(_rounded(size) for size in sizes.values()), used) if moved else None
        copies, offset = dict(tensors), 0
        for key, tensor in moved.items():
            assert buffer is not None
            room = buffer[offset : offset + sizes[key]].view(tensor.dtype).view(tensor.shape)
            copies[key] = room.copy_(tensor, non_blocking=True)
            offset += _rounded(sizes[key])
        if moved and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copies

    def _buffer(self, nbytes: int, used: set[int]) -> torch.Tensor:
        """Return a buffer of at least ``nbytes`` bytes in which nothing lies that is used."""
        free = [each for each in self._buffers if each.data_ptr() not in used and each.numel() >= nbytes]
        if free:
            return min(free, key=torch.Tensor.numel)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        lock_pages(buffer)
        self._buffers.append(buffer)
        return buffer


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
