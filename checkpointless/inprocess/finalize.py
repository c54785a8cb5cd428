"""Clean up in the main thread after an abort, before the block is entered again."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from checkpointless.inprocess.generation import HPState
from checkpointless.system.environment import RANK_ENV

logger = logging.getLogger(__name__)


def _forget_accelerate() -> None:
    """Drop what Hugging Face Accelerate keeps in classes, among it that the process group has been made."""
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


# Accelerate's is here, because a loop of one's own imports nothing of ours that is made for it.
_framework_cleanups: dict[str, Callable[[], None]] = {"accelerate": _forget_accelerate}


def register_cleanup(name: str, cleanup: Callable[[], None]) -> None:
    """Register an idempotent ``cleanup`` of a framework's globals, run at restarts before groups are destroyed."""
    _framework_cleanups[name] = cleanup


class Finalize(ABC):
    """An action that cleans up one kind of thing, in the main thread. It must be safe to repeat."""

    @abstractmethod
    def __call__(self, state: HPState) -> None:
        """Clean up."""


class CheckpointlessFinalizeCleanup(Finalize):
    """Runs the clean-ups that frameworks registered (:func:`register_cleanup`), to drop what they keep in globals.

    It does not search the heap.
    """

    def __init__(self) -> None:
        self._trainer: weakref.ref[object] | None = None

    @property
    def trainer(self) -> object | None:
        """The trainer of the generation that is over, as long as it exists, or None."""
        return self._trainer() if self._trainer is not None else None

    @trainer.setter
    def trainer(self, trainer: object | None) -> None:
        self._trainer = None if trainer is None else weakref.ref(trainer)

    def register_attributes(self, trainer: object) -> None:
        """Keep a weak reference to the running trainer."""
        self.trainer = trainer

    def __call__(self, *a: Any, **kw: Any) -> None:
        """Clean up, each framework even if another fails. The engine passes the rank's :class:`HPState`.

        Raises:
            Exception: the first error of a clean-up; all are logged.
        """
        failed: Exception | None = None
        for name, cleanup in list(_framework_cleanups.items()):
            try:
                cleanup()
            except Exception as error:
                logger.exception("rank %s: the clean-up of %s failed", os.environ.get(RANK_ENV, "0"), name)
                failed = failed or error
        if failed is not None:
            raise failed


def collect_garbage() -> None:
    """Free unreachable memory of this process, in the thread that ran the block, and CUDA's cache of it."""
    _empty_backward_queue()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _empty_backward_queue() -> None:
    """Drop what a backward pass that raised has left in autograd's queue of this thread, with gradients.

    Autograd takes the nodes made last first (``CompareNodeTaskTime``), counted by thread: a node of a new thread
    comes after all that are left, which are dropped on the way, because their pass is over.
    """
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="cpu", requires_grad=True) * 1))
    thread.start()
    thread.join()
    for each in made:  # none if the thread has failed, which it has said
        each.backward()
