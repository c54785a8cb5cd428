"""Digests of tensors (position-aware, for any dtype, computed on the tensor's device) and of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash

from checkpointless.serialization.tensor_memory import dtype_name, tensor_bytes

_LANE_BYTES = 8
_CHUNK_LANES = 1 << 22  # 32 MiB at a time; the intermediate results of a digest on a GPU take four times as much
_GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as a signed number
# The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): shifts and
# multipliers, as signed numbers. A weaker mix lets the sign bits of two floats in two lanes cancel out.
_FINALIZER = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
_WORD = (1 << 64) - 1
_weights: dict[torch.device, torch.Tensor] = {}


def digest_bytes(flat: torch.Tensor) -> int:
    """Return the 64-bit digest of a flat uint8 tensor of shape ``(n,)``.

    On the CPU this is xxh3-64. On another device it is a different digest, so that nothing is copied to the host.
    Two digests can be compared only if their bytes lay on the same kind of device.
    """
    if flat.device.type != "cpu":
        return digest_on_device(flat)
    return xxhash.xxh3_64_intdigest(flat.numpy().data)


def digest_parts(parts: Iterable[torch.Tensor]) -> int:
    """Return what :func:`digest_bytes` gives for the parts, flat uint8 tensors, laid end to end on the CPU."""
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part.cpu().numpy().data)
    return total.intdigest()


def digest_on_device(flat: torch.Tensor) -> int:
    """Return the 64-bit digest of a flat uint8 tensor, computed on its device with torch operations alone.

    The digest is the sum over all 8-byte lanes of a bijective mix of the lane with a weight for its position. A
    change of one lane always changes the digest. An exchange of two lanes changes it unless the lanes are equal or
    their mixes happen to collide.
    """
    whole = flat.numel() // _LANE_BYTES * _LANE_BYTES
    sums: list[tuple[int, torch.Tensor]] = []
    body, tail = flat[:whole], flat[whole:]
    if tail.numel():
        padded = torch.zeros(_LANE_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: tail.numel()] = tail
        sums.append((-1, _mixed_sum(padded.view(torch.int64))))
    if whole:
        if body.storage_offset() % _LANE_BYTES or body.data_ptr() % _LANE_BYTES:
            body = body.clone()
        lanes = body.view(torch.int64)
        for number, start in enumerate(range(0, lanes.numel(), _CHUNK_LANES)):
            sums.append((number, _mixed_sum(lanes[start : start + _CHUNK_LANES])))
    if not sums:
        return 0
    values = torch.stack([value for _, value in sums]).tolist()  # the only point that waits for the device
    weighed = sum((2 * number + 5) * value for (number, _), value in zip(sums, values))
    return (flat.numel() + weighed) & _WORD


def _mixed_sum(lanes: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed lanes of one chunk: int64, shape ``()``."""
    mixed = lanes + _positions(lanes.device)[: lanes.numel()]
    for shift, factor in _FINALIZER:
        shifted = (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # a logical shift: no sign bits
        mixed = mixed.bitwise_xor_(shifted)
        if factor != 1:
            mixed = mixed.mul_(factor)
    return mixed.sum()


def _positions(device: torch.device) -> torch.Tensor:
    """Return one weight per lane of a chunk: int64, shape ``(_CHUNK_LANES,)``."""
    if device not in _weights:
        _weights[device] = torch.arange(1, _CHUNK_LANES + 1, dtype=torch.int64, device=device) * _GOLDEN
    return _weights[device]


def digest_parameters(modules: Iterable[torch.nn.Module]) -> str:
    """Return the digest (xxh3-128, hex) of the names and bytes of all parameters, for comparing two runs."""
    return _digest_named(named for module in modules for named in module.named_parameters())


def digest_buffers(modules: Iterable[torch.nn.Module]) -> str:
    """Return the digest (xxh3-128, hex) of the names and bytes of all buffers.

    It includes the buffers that a ``state_dict`` leaves out, because they take part in the next step.
    """
    return _digest_named(named for module in modules for named in module.named_buffers())


def _digest_named(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor).cpu().numpy().data)
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
        total = xxhash.xxh3_128()
        for key, tensor in tensors.items():
            total.update(f"{key}|{dtype_name(tensor.dtype)}|{tuple(tensor.shape)}|".encode())
            flat = tensor_bytes(tensor)
            if flat.device.type == "cpu":
                total.update(flat.numpy().data)
            else:
                total.update(digest_on_device(flat).to_bytes(8, "little"))
        return total.hexdigest()

    def digest_each(self, tensors: Mapping[tuple, torch.Tensor]) -> dict[tuple, int]:
        """Return each tensor's digest by its key, to find out which tensors differ."""
        return {key: self.digest(tensor) for key, tensor in tensors.items()}
