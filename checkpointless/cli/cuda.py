"""Whether this machine has GPUs."""

from __future__ import annotations


def has_cuda() -> bool:
    """Return whether there is a CUDA device; imports torch, and leaves CUDA as it is."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its own imports
        import torch
    return torch.cuda.device_count() > 0  # asks NVML first, without initialising CUDA: ranks are forked from here
