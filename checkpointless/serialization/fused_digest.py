"""The digest on a GPU in one pass over memory, if Triton is installed and its kernel compiles."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

BLOCK_LANES = 2048  # 16 KiB for each program: 16 loads in flight for each of its 128 threads
_LANE_BYTES = 8
_KERNEL = "checkpointless.serialization.digest_kernel"


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
