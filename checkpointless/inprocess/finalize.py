"""Clean up in the main thread after an abort, before the block is entered again."""

from __future__ import annotations

import gc
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from checkpointless.inprocess.abort import destroy_process_groups
from checkpointless.inprocess.state import HPState

logger = logging.getLogger(__name__)

_framework_cleanups: dict[str, Callable[[], None]] = {}


def register_cleanup(name: str, cleanup: Callable[[], None]) -> None:
    """Have ``cleanup`` run at every restart of this process: how a framework drops its globals.

    Args:
        name: registering the same name again replaces the earlier one.
        cleanup: idempotent; runs before the process groups are destroyed.
    """
    _framework_cleanups[name] = cleanup


class Finalize(ABC):
    """Cleans up one kind of thing. Runs in the main thread, and must be safe to repeat."""

    @abstractmethod
    def __call__(self, state: HPState) -> None:
        """Clean it up.

        Args:
            state: the rank's place in the job.
        """


class CheckpointlessFinalizeCleanup(Finalize):
    """Drop framework globals, process groups and unreachable memory.

    What the frameworks keep in globals is dropped by the clean-ups that they registered
    (:func:`register_cleanup`): nothing is searched for in the heap.

    Args:
        collect: run the cyclic collector and empty CUDA's cache.
    """

    def __init__(self, collect: bool = True) -> None:
        self.collect = collect
        self._trainer: weakref.ref[Any] | None = None

    @property
    def trainer(self) -> Any:
        """The trainer of the generation that is over, while it lives, or None."""
        return self._trainer() if self._trainer is not None else None

    def register_attributes(self, trainer: Any) -> None:
        """Take note of the running trainer (held weakly)."""
        self._trainer = weakref.ref(trainer)

    def __call__(self, state: HPState) -> None:
        failed: Exception | None = None
        for name, cleanup in list(_framework_cleanups.items()):
            try:
                cleanup()
            except Exception as error:
                logger.exception("rank %d: the clean-up of %s failed", state.rank, name)
                failed = failed or error
        destroy_process_groups()
        if self.collect:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        if failed is not None:
            raise failed
