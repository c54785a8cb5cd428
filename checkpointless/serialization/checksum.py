"""Digests of tensors (position-aware, for any dtype, computed on the tensor's device) and of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash

from checkpointless.serialization.pending_digests import PendingDigests
from checkpointless.serialization.tensor_memory import dtype_name, is_on_host, local_part, tensor_bytes


def digest_bytes(flat: torch.Tensor) -> int:
    """Return the 64-bit digest of a flat uint8 tensor of shape ``(n,)``.

    On the CPU this is xxh3-64. On another device it is a different digest, so that nothing is copied to the host.
    Two digests can be compared only if their bytes lay on the same kind of device.
    """
    pending = PendingDigests()
    pending.add(flat)
    return pending.fetch()[0]


def digest_parts(parts: Iterable[torch.Tensor]) -> int:
    """Return what :func:`digest_bytes` gives for the parts, flat uint8 tensors, laid end to end on the CPU."""
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part.cpu().numpy().data)
    return total.intdigest()


def digest_parameters(modules: Iterable[torch.nn.Module]) -> str:
    """Return the digest (xxh3-128, hex) of the names and bytes of all parameters, for comparing two runs.

    Of a DTensor, it is that of this rank's part. Of a parameter that TransformerEngine keeps in FP8, it is that of
    the values that it stands for.
    """
    return _digest_named(
        (name, parameter.dequantize() if hasattr(parameter, "_quantizer") else parameter)
        for module in modules
        for name, parameter in module.named_parameters()
    )


def digest_buffers(modules: Iterable[torch.nn.Module]) -> str:
    """Return the digest (xxh3-128, hex) of the names and bytes of all buffers.

    It includes the buffers that a ``state_dict`` leaves out, because they take part in the next step.
    """
    return _digest_named(named for module in modules for named in module.named_buffers())


def _digest_named(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor_bytes(local_part(tensor)).cpu().numpy().data)
    return digest.hexdigest()


class MemoryChecksumManager:
    """Computes digests of a rank's tensors, to compare replicas and to check what was moved.

    Args:
        enabled: compare the replicas of every shard before a recovery.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled

    def digest(self, tensor: torch.Tensor) -> int:
        """Return the 64-bit digest of one tensor's bytes."""
        return digest_bytes(tensor_bytes(tensor))

    def digest_all(self, tensors: Mapping[tuple, torch.Tensor]) -> str:
        """Return one digest (128 bits, hex) over keys, dtypes, shapes and bytes, in the mapping's order."""
        on_devices = PendingDigests()
        for tensor in tensors.values():
            if not is_on_host(tensor):
                on_devices.add(tensor_bytes(tensor))
        digests = iter(on_devices.fetch())
        total = xxhash.xxh3_128()
        for key, tensor in tensors.items():
            total.update(f"{key}|{dtype_name(tensor.dtype)}|{tuple(tensor.shape)}|".encode())
            if is_on_host(tensor):
                total.update(tensor_bytes(tensor).numpy().data)
            else:
                total.update(next(digests).to_bytes(8, "little"))
        return total.hexdigest()

    def digest_each(self, tensors: Mapping[tuple, torch.Tensor]) -> dict[tuple, int]:
        """Return each tensor's digest by its key, to find out which tensors differ."""
        pending = PendingDigests()
        for tensor in tensors.values():
            pending.add(tensor_bytes(tensor))
        return dict(zip(tensors, pending.fetch(), strict=True))
