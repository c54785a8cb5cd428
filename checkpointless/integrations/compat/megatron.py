"""Private names of Megatron-core and Megatron-Bridge, each with the versions in which it was seen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from megatron.core import num_microbatches_calculator

# A background save in Megatron's queue (0.12 to 0.19).
from megatron.core.dist_checkpointing.strategies.async_utils import _ActiveAsyncRequest as ActiveAsyncRequest

# Switches the garbage collector off in a process that writes a checkpoint (0.12 to 0.19).
from megatron.core.dist_checkpointing.strategies.filesystem_async import _disable_gc as disable_gc

# Keeps the graphs of captured layers (0.14 to 0.19).
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord as CudagraphGlobalRecord

_WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)


def microbatches_calculator() -> num_microbatches_calculator.NumMicroBatchesCalculator | None:
    """Return the calculator of microbatches of this process (0.12 to 0.19)."""
    return num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR


#: Of ``megatron.training.training``: the times of a process's start, by which ``pretrain`` chooses its first
#: collectives (0.19).
STARTUP_TIMESTAMPS = "_STARTUP_TIMESTAMPS"

#: In Megatron-core's ``filesystem_async``: the queue that the writers of a save report to (0.15).
RESULTS_QUEUE = "_results_queue"


def queues_of_writers() -> Iterator[tuple[ModuleType, str]]:
    """Yield the functions that make the queue which the writers of a save report to, as modules and names.

    Megatron-core's is ``_get_write_results_queue`` (0.16) or ``get_write_results_queue`` (0.19). Bridge 0.6 takes
    that of nvidia-resiliency-ext (0.6) if it is installed, for a save that nobody waits for and for any other.
    """
    for writer in _WRITERS:
        try:
            module = importlib.import_module(writer)
        except ImportError:
            continue
        for name in ("_get_write_results_queue", "get_write_results_queue"):
            if hasattr(module, name):
                yield module, name


# Megatron-Bridge (0.3.1, 0.6.2)

#: Of a sampler of whole batches: how many samples a batch of all ranks has; and, if it counts on over its passes
#: (0.6.2; 0.3.1 begins each pass where it resumed), a method that returns how many a pass takes.
BATCH_SIZE, SAMPLES_OF_A_PASS = "_global_batch_size", "_active_total_samples"

#: Of Bridge's configuration: whether its setup fails where it finds no checkpoint, as in its ``finetune`` (0.6.2).
CHECKPOINT_REQUIRED = "_checkpoint_load_required"
