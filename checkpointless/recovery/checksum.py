"""Digests of tensors: position-aware, any dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from checkpointless.recovery.state_tree import dtype_name, tensor_bytes


def digest_bytes(flat: torch.Tensor) -> int:
    """xxh3-64 of a flat uint8 tensor, shape ``(n,)``, on any device (a CUDA tensor is copied to the host)."""
    return xxhash.xxh3_64_intdigest(flat.cpu().numpy().data)


class MemoryChecksumManager:
    """Digests of a rank's tensors, to compare replicas and to check what was moved.

    Args:
        enabled: compare the replicas of every shard before a recovery.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled

    def digest(self, tensor: torch.Tensor) -> int:
        """Digest of one tensor's bytes (64 bits)."""
        return digest_bytes(tensor_bytes(tensor))

    def digest_all(self, tensors: Mapping[tuple, torch.Tensor]) -> str:
        """One digest over keys, dtypes, shapes and bytes, in the mapping's order (128 bits, hex)."""
        total = xxhash.xxh3_128()
        for key, tensor in tensors.items():
            total.update(f"{key}|{dtype_name(tensor.dtype)}|{tuple(tensor.shape)}|".encode())
            total.update(tensor_bytes(tensor).cpu().numpy().data)
        return total.hexdigest()
