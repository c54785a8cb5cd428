"""Tells a running wrapper when a batch is being fetched and when the forward pass begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkpointless.inprocess import HPCallWrapper


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
