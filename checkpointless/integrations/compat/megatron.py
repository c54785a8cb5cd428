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


def startup_timestamps(training: ModuleType) -> dict[str, float | None]:
    """Return the times of this process's start, by which ``pretrain`` chooses its first collectives (0.19).

    Args:
        training: the module ``megatron.training.training``.
    """
    timestamps: dict[str, float | None] = training._STARTUP_TIMESTAMPS
    return timestamps


# Megatron-Bridge (0.3.1, 0.6.2)


def samples_of_a_pass(sampler: object) -> int | None:
    """Return how many samples a pass takes for a sampler of whole batches that counts on over its passes (0.6.2).

    Returns:
        None: it begins each pass where it resumed (0.3.1), or is another sampler.
    """
    count = getattr(sampler, "_active_total_samples", None)
    return None if count is None else int(count())


def samples_of_a_whole_batch(sampler: object) -> int | None:
    """Return how many samples a batch of all ranks has for a sampler of whole batches; None for another one."""
    size: int | None = getattr(sampler, "_global_batch_size", None)
    return size


def require_checkpoint(config: object) -> None:
    """Have Bridge's setup fail where it finds no checkpoint, as its ``finetune`` does (0.6.2)."""
    name = "_checkpoint_load_required"
    if hasattr(config, name):
        setattr(config, name, True)


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
