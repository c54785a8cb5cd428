"""Faults of memory and of the GPU, caused by torch itself in a process that has imported it.

Torch is looked up, not imported, because a process that trains has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

_NO_HOST_HAS_BYTES = 1 << 62  # more than the address space holds, so that the kernel refuses at once


def has_torch() -> bool:
    """Return whether this process has imported torch."""
    return "torch" in sys.modules


def has_cuda() -> bool:
    """Return whether this process can train on a GPU with CUDA."""
    return has_torch() and bool(_torch().cuda.is_available())


def run_out_of_memory() -> None:
    """Request more memory than exists: on the current GPU if CUDA is in use, otherwise on the host.

    No memory is kept, because it is requested in one piece, which is refused.

    Raises:
        RuntimeError: torch refused the memory; on a GPU this is ``torch.OutOfMemoryError``.
    """
    torch = _torch()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        nbytes = 2 * torch.cuda.get_device_properties(device).total_memory
    else:
        device, nbytes = torch.device("cpu"), _NO_HOST_HAS_BYTES
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def fail_device_assert() -> None:
    """Make a kernel read outside a tensor on the current GPU, and wait until it has done so.

    Raises:
        RuntimeError: torch reports the assertion that failed. This process's CUDA context is lost.
    """
    torch = _torch()
    outside = torch.ones(1, dtype=torch.int64, device="cuda")
    torch.zeros(1, device="cuda")[outside]
    torch.cuda.synchronize()


def _torch() -> Any:
    return sys.modules["torch"]
