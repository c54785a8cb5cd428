"""Tells a running wrapper which phase of a step begins, where neither Lightning nor Megatron has a hook for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from checkpointless.inprocess import HPCallWrapper
from checkpointless.recovery.training.repeated_steps import repeated_steps

if TYPE_CHECKING:
    from megatron.core import ModelParallelConfig


def announce_gradient_sync(config: ModelParallelConfig, call: HPCallWrapper) -> None:
    """Announce the phase ``sync`` before Megatron reduces the gradients, if the wrapper causes faults.

    Args:
        config: the model's configuration, whose ``finalize_model_grads_func`` reduces the gradients.
        call: the running wrapper.
    """
    finalize = config.finalize_model_grads_func
    if call.faults is None or finalize is None:
        return

    def announced(*args: Any, **kwargs: Any) -> Any:
        call.enter_phase("sync", call.steps.making)
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = announced


class PhasedIterator(Iterator[Any]):
    """An iterator over batches that announces the phases of the step in the making, and notes what the step takes.

    Args:
        inner: the iterator that Lightning hands to the training step.
        call: the running wrapper.
    """

    def __init__(self, inner: Iterator[Any], call: HPCallWrapper) -> None:
        self._inner = inner
        self._call = call

    def __next__(self) -> Any:
        step = self._call.steps.making
        self._call.enter_phase("data", step)
        item = next(self._inner)
        repeated_steps.take(step, item)
        self._call.enter_phase("forward", step)
        return item
