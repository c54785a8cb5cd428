"""Faults of memory and of the GPU, brought about by torch itself in a process that has imported it.

Torch is looked up, not imported: a process that trains has it.
"""

from __future__ import annotations

import sys
from typing import Any

_NO_HOST_HAS_BYTES = 1 << 62  # more than the address space holds, so that the kernel refuses at once


def has_torch() -> bool:
    """Whether this process has imported torch."""
    return "torch" in sys.modules


def has_cuda() -> bool:
    """Whether this process can train on a GPU with CUDA."""
    return has_torch() and bool(_torch().cuda.is_available())


def run_out_of_memory() -> None:
    """Ask for more memory than exists: of the current GPU where CUDA is in use, else of the host.

    Nothing is kept: it is asked for in one piece, which is refused.

    Raises:
        RuntimeError: torch's own; on a GPU ``torch.OutOfMemoryError``.
    """
    torch = _torch()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        nbytes = 2 * torch.cuda.get_device_properties(device).total_memory
    else:
        device, nbytes = torch.device("cpu"), _NO_HOST_HAS_BYTES
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def fail_device_assert() -> None:
    """Have a kernel read outside of a tensor on the current GPU, and wait until it has.

    Raises:
        RuntimeError: torch's own, of the assertion that failed. This process's CUDA context is lost.
    """
    torch = _torch()
    outside = torch.ones(1, dtype=torch.int64, device="cuda")
    torch.zeros(1, device="cuda")[outside]
    torch.cuda.synchronize()


def _torch() -> Any:
    return sys.modules["torch"]
