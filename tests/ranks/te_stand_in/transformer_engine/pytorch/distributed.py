"""Stands for what Megatron looks up here when it is imported."""

from contextlib import nullcontext


class CudaRNGStatesTracker:
    """The random streams, by name; no test uses it."""


activation_recompute_forward = nullcontext
