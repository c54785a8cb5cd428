"""The digest of bytes on a device: computed there, with nothing copied to the host but its 8 bytes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

CHUNK_LANES = 1 << 22  # 32 MiB at a time; the intermediate results of torch's operations take four times as much
BLOCK_LANES = 2048  # of the kernel; 16 KiB for each program: 16 loads in flight for each of its 128 threads
_LANE_BYTES = 8
_KERNEL = "checkpointless.state.serialization.digest_kernel"
_GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as a signed number
# The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): shifts and
# multipliers, as signed numbers. A weaker mix lets the sign bits of two floats in two lanes cancel out.
_FINALIZER = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
_WORD = (1 << 64) - 1
_weights: dict[tuple[torch.device, int], torch.Tensor] = {}


def digest_on_device(flat: torch.Tensor) -> int:
    """Return the 64-bit digest of a flat uint8 tensor, computed on its device. This waits for the device.

    The digest is the sum over all 8-byte lanes of a bijective mix of the lane with a weight for its position. A
    change of one lane always changes the digest. An exchange of two lanes changes it unless the lanes are equal or
    their mixes happen to collide.
    """
    return unsigned(int(digest_tensor(flat).item()))


def digest_tensor(flat: torch.Tensor) -> torch.Tensor:
    """Return :func:`digest_on_device` of ``flat`` as a tensor, without waiting for the device.

    On a GPU with Triton this is one kernel, which reads every byte once; else a number of torch's operations.

    Returns:
        The digest as a signed number (:func:`unsigned`), int64 of shape ``()`` on the device of ``flat``.
    """
    found = _fused(flat, CHUNK_LANES)
    return torch_digest(flat, CHUNK_LANES) if found is None else found


def unsigned(value: int) -> int:
    """Return the digest that a signed number of 64 bits stands for."""
    return value & _WORD


def torch_digest(flat: torch.Tensor, chunk_lanes: int) -> torch.Tensor:
    """Return the digest of a flat uint8 tensor, computed with torch's operations alone, as :func:`digest_tensor`.

    Args:
        flat: the bytes.
        chunk_lanes: how many lanes a chunk has, of which digests depend.
    """
    whole = flat.numel() // _LANE_BYTES * _LANE_BYTES
    body, tail = flat[:whole], flat[whole:]
    total = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    if tail.numel():
        padded = torch.zeros(_LANE_BYTES, dtype=torch.uint8, device=flat.device)
        padded[: tail.numel()] = tail
        total += _weighed_sum(-1, padded.view(torch.int64), chunk_lanes)
    if whole:
        if body.storage_offset() % _LANE_BYTES or body.data_ptr() % _LANE_BYTES:
            body = body.clone()
        lanes = body.view(torch.int64)
        for number, start in enumerate(range(0, lanes.numel(), chunk_lanes)):
            total += _weighed_sum(number, lanes[start : start + chunk_lanes], chunk_lanes)
    return total


def _weighed_sum(number: int, lanes: torch.Tensor, chunk_lanes: int) -> torch.Tensor:
    """Return what the chunk of that number adds to the digest: the sum of its mixed lanes, weighed; int64."""
    mixed = lanes + _positions(lanes.device, chunk_lanes)[: lanes.numel()]
    for shift, factor in _FINALIZER:
        shifted = (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # a logical shift: no sign bits
        mixed = mixed.bitwise_xor_(shifted)
        if factor != 1:
            mixed = mixed.mul_(factor)
    return mixed.sum() * (2 * number + 5)


def _positions(device: torch.device, chunk_lanes: int) -> torch.Tensor:
    """Return one weight per lane of a chunk: int64, shape ``(chunk_lanes,)``."""
    name = (device, chunk_lanes)
    if name not in _weights:
        _weights[name] = torch.arange(1, chunk_lanes + 1, dtype=torch.int64, device=device) * _GOLDEN
    return _weights[name]


class Kernel(Protocol):
    """What is used of a kernel of Triton's."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        """Return what launches as many programs as the grid has."""


class FusedDigest:
    """Launches the kernel, until it turns out that it does not work here."""

    def __init__(self) -> None:
        self._kernel: Kernel | None = None
        self._is_of_use = True

    def __call__(self, flat: torch.Tensor, chunk_lanes: int) -> torch.Tensor | None:
        """Return the digest of ``flat``, a flat uint8 tensor, without waiting for the device.

        Args:
            flat: the bytes.
            chunk_lanes: how many lanes a chunk has.

        Returns:
            The digest, int64 of shape ``()`` on the device; None if ``flat`` is not on a GPU, or the kernel
            does not work here. Then the same digest has to be computed in another way.
        """
        if flat.device.type != "cuda" or not self._is_of_use:
            return None
        try:
            if self._kernel is None:
                self._kernel = load_kernel()
            with torch.cuda.device(flat.device):
                return launch(self._kernel, flat, chunk_lanes, BLOCK_LANES)
        except ImportError:  # quietly: not everybody has Triton
            self._is_of_use = False
        except Exception as error:  # noqa: BLE001 - compilers fail in many ways; an error of the device comes up again
            self._is_of_use = False
            logger.warning("digests take several passes over memory: Triton's kernel failed: %r", error)
        return None


def load_kernel() -> Kernel:
    """Return the kernel.

    Raises:
        ImportError: Triton is not installed.
    """
    kernel: Kernel = importlib.import_module(_KERNEL).add_digest
    return kernel


def launch(kernel: Kernel, flat: torch.Tensor, chunk_lanes: int, block_lanes: int) -> torch.Tensor:
    """Return what ``kernel`` computes of ``flat``, without waiting for it.

    Args:
        kernel: the kernel, compiled or interpreted.
        flat: the bytes, uint8 of shape ``(n,)``.
        chunk_lanes: how many lanes a chunk has.
        block_lanes: how many lanes each program reads: a power of two that divides ``chunk_lanes``.

    Returns:
        The digest, int64 of shape ``()`` on the device of ``flat``.

    Raises:
        ValueError: a block does not lie in one chunk.
    """
    if block_lanes & (block_lanes - 1) or chunk_lanes % block_lanes:
        raise ValueError(f"blocks of {block_lanes} lanes do not fit into chunks of {chunk_lanes}")
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    nbytes = flat.numel()
    if nbytes == 0:
        return total
    whole = nbytes // _LANE_BYTES
    aligned = whole > 0 and flat.storage_offset() % _LANE_BYTES == 0 and flat.data_ptr() % _LANE_BYTES == 0
    words = flat[: whole * _LANE_BYTES].view(torch.int64) if aligned else flat
    programs = max(1, -(-whole // block_lanes))
    kernel[(programs,)](flat, words, total, nbytes, block=block_lanes, chunk=chunk_lanes, aligned=aligned)
    return total


_fused = FusedDigest()
