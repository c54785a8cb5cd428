"""Tells a running wrapper which phase of a step begins, where neither Lightning nor Megatron has a hook for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpointless.inprocess import HPCallWrapper


def announce_gradient_sync(config: Any, call: HPCallWrapper) -> None:
    """Have the phase ``sync`` announced before Megatron reduces the gradients, if anybody wants to know.

    Args:
        config: the model's; its ``finalize_model_grads_func`` is what reduces them.
        call: the running wrapper.
    """
    finalize = config.finalize_model_grads_func
    if call.phase_hook is None or finalize is None:
        return

    def announced(*args: Any, **kwargs: Any) -> Any:
        call.enter_phase("sync", call.making_step)
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = announced


class PhasedIterator(Iterator[Any]):
    """An iterator over batches that announces the phases ``data`` and ``forward`` of the step in the making.

    Args:
        inner: the iterator that Lightning hands to the training step.
        call: the running wrapper.
    """

    def __init__(self, inner: Iterator[Any], call: HPCallWrapper) -> None:
        self._inner = inner
        self._call = call

    @classmethod
    def around(cls, inner: Iterator[Any], call: HPCallWrapper) -> Iterator[Any]:
        """``inner``, wrapped if anybody wants to know."""
        return cls(inner, call) if call.phase_hook is not None else inner

    def __next__(self) -> Any:
        self._call.enter_phase("data", self._call.making_step)
        item = next(self._inner)
        self._call.enter_phase("forward", self._call.making_step)
        return item
