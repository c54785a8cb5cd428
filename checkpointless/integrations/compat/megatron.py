"""Megatron-core's private names, each with the versions in which it was seen (0.12 to 0.16)."""

from __future__ import annotations

from megatron.core import num_microbatches_calculator

# A background save in Megatron's queue (0.12 to 0.16).
from megatron.core.dist_checkpointing.strategies.async_utils import _ActiveAsyncRequest as ActiveAsyncRequest

# Switches the garbage collector off in a process that writes a checkpoint (0.12 to 0.16).
from megatron.core.dist_checkpointing.strategies.filesystem_async import _disable_gc as disable_gc

# Keeps the graphs of captured layers (0.14 to 0.16).
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord as CudagraphGlobalRecord

__all__ = ["ActiveAsyncRequest", "CudagraphGlobalRecord", "disable_gc", "microbatches_calculator"]


def microbatches_calculator() -> num_microbatches_calculator.NumMicroBatchesCalculator | None:
    """Return the calculator of microbatches of this process (0.12 to 0.16)."""
    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
