"""Clean up in the main thread after an abort, before the block is entered again."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

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
    """Drop what the frameworks keep in globals, by the clean-ups that they registered (:func:`register_cleanup`).

    Nothing is searched for in the heap. Process groups and garbage are not its business: the engine sees to them
    after any clean-up.
    """

    def __init__(self) -> None:
        self._trainer: weakref.ref[Any] | None = None

    @property
    def trainer(self) -> Any:
        """The trainer of the generation that is over, while it lives, or None."""
        return self._trainer() if self._trainer is not None else None

    def register_attributes(self, trainer: Any) -> None:
        """Take note of the running trainer (held weakly)."""
        self._trainer = weakref.ref(trainer)

    def __call__(self, *a: Any, **kw: Any) -> None:
        """Clean up.

        Args:
            *a: the engine gives the rank's :class:`HPState`; anything, or nothing, is taken.
            **kw: likewise.
        """
        failed: Exception | None = None
        for name, cleanup in list(_framework_cleanups.items()):
            try:
                cleanup()
            except Exception as error:
                logger.exception("rank %s: the clean-up of %s failed", os.environ.get("RANK", "0"), name)
                failed = failed or error
        if failed is not None:
            raise failed


def collect_garbage() -> None:
    """Free unreachable memory of this process and what CUDA's allocator keeps of it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
