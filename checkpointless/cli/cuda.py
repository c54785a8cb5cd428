"""How many GPUs this machine has."""

from __future__ import annotations

from pathlib import Path

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL and of AMD


def count_cuda() -> int:
    """Return the number of CUDA devices that a process sees; leaves CUDA as it is.

    It imports torch, which takes seconds, only where there is a driver.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its own imports
        import torch
    return torch.cuda.device_count()  # asks NVML first, without initialising CUDA: ranks are forked from here


def has_cuda() -> bool:
    """Return whether there is a CUDA device."""
    return count_cuda() > 0
