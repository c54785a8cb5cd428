"""The memory, threads and descriptors that this process holds."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import torch

_PROC = Path("/proc/self")
_RESET_PEAK = "5"  # see proc(5), clear_refs
_before: dict[str, int] = {}  # bytes held when the peak was last reset


def memory_status() -> dict[str, int]:
    """Return resident host memory and, with CUDA, device memory in bytes, threads and open descriptors."""
    process = psutil.Process()
    status = {
        "rss_bytes": int(process.memory_info().rss),
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }
    if torch.cuda.is_initialized():
        status["cuda_allocated_bytes"] = torch.cuda.memory_allocated()
        status["cuda_reserved_bytes"] = torch.cuda.memory_reserved()
    return status


def reset_peak() -> None:
    """Begin the measurement of :func:`peak_growth`; of host memory only where the kernel allows it."""
    _before.clear()
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text(_RESET_PEAK)
        _before["rss"] = _resident_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        _before["cuda"] = torch.cuda.memory_allocated()


def peak_growth() -> dict[str, int]:
    """Return by how many bytes memory has at most grown since :func:`reset_peak`, as far as known."""
    grown: dict[str, int] = {}
    if "rss" in _before:
        grown["peak_growth_bytes"] = _resident_peak() - _before["rss"]
    if "cuda" in _before:
        grown["cuda_peak_growth_bytes"] = torch.cuda.max_memory_allocated() - _before["cuda"]
    return grown


def _resident_peak() -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not report the peak of resident memory")
