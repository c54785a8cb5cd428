"""What this process holds: memory, threads, descriptors."""

from __future__ import annotations

import psutil
import torch


def memory_status() -> dict[str, int]:
    """Resident host memory and, where CUDA is in use, device memory, in bytes; threads and open descriptors."""
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
