"""A copy that the process makes which Megatron forks to write a checkpoint, in memory that it shares with this one.

A forked process sees the state as it was when it was forked, whatever training does to it since. So nothing need be
copied before the fork, if the state lies in host memory. On GPUs it does not.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from checkpointless.recovery.tiers.host_part import HostPart, copy_into

logger = logging.getLogger(__name__)


class ForkedCopy:
    """Copies tensors into a part, in this process or in one that is forked from it.

    Args:
        part: the room, in memory that forked processes share.
        tensors: the tensors, in host memory.

    Attributes:
        is_forgotten: whether no process makes the copy any more.
    """

    def __init__(self, part: HostPart, tensors: Sequence[torch.Tensor]) -> None:
        self._part, self._tensors = part, tensors
        self._made = multiprocessing.get_context("fork").Semaphore(0)  # released by the process that copies
        self._process = os.getpid()
        self._is_made = False
        self.is_forgotten = False

    @property
    def is_made(self) -> bool:
        """Whether the copy has been made, in this process or in a forked one. One thread asks."""
        self._is_made = self._is_made or self._made.acquire(block=False)
        return self._is_made

    def make(self) -> None:
        """Make the copy."""
        if os.getpid() != self._process:
            torch.set_num_threads(1)  # the others have not been forked, and would be waited for
        copy_into(self._part, self._tensors)
        self._made.release()

    def forget(self) -> None:
        """Let go of the tensors: no process makes the copy any more."""
        self.is_forgotten, self._tensors = True, ()

    def before(self, write: Callable[..., None]) -> Callable[..., None]:
        """Return a function that makes the copy, and then writes."""
        return _CopyFirst(self, write)


class _CopyFirst:
    """Makes a copy, and then writes.

    If it is sent to a process that was not forked, the copy is made here, while the thread that trains waits until
    that process has taken over the state.
    """

    def __init__(self, copy: ForkedCopy, write: Callable[..., None]) -> None:
        self._copy, self._write = copy, write

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:
            self._copy.make()
        except Exception:  # the checkpoint counts more
            logger.exception("no copy is kept of what is written")
        self._write(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self._copy.make()
        return _unchanged, (self._write,)


def _unchanged(write: Callable[..., None]) -> Callable[..., None]:
    return write
