"""Faults in the worker processes of a torch data loader, seen by the training process as torch reports them.

Batches that the workers have prefetched are used up, so that the fault shows at exactly the batch for which it was
requested. An iterator that has failed is of no use afterwards anyway.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class _Worker(Protocol):
    """A worker process of a data loader."""

    pid: int

    def is_alive(self) -> bool:
        """Return whether the process runs."""


class WorkersIterator(Protocol):
    """Torch's iterator over a ``DataLoader`` with workers (``_MultiProcessingDataLoaderIter``)."""

    _sampler_iter: Iterator[object]
    _workers: Sequence[_Worker]

    def __iter__(self) -> Iterator[object]:
        """Return the iterator itself."""


class _BadBatch:
    """Stand-in for the indices of a batch that a sampler yields, which no dataset can read.

    Args:
        error: exception that is raised in the worker that tries to read the batch.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    __getitem__ = __index__ = __iter__ = __len__ = _refuse


def raise_in_worker(iterator: WorkersIterator, error: Exception) -> None:
    """Make a worker raise while it reads a batch.

    Args:
        iterator: torch's iterator over a ``DataLoader`` with workers.
        error: exception that the worker raises; it is pickled, and its type must accept a message as only argument.

    Raises:
        Exception: an exception of the type of ``error``, which torch raises with the worker's traceback in its
            message.
    """
    iterator._sampler_iter = itertools.repeat(_BadBatch(error))
    _use_up(iterator)


def kill_worker(iterator: WorkersIterator) -> None:
    """Kill a worker with SIGKILL.

    Args:
        iterator: torch's iterator over a ``DataLoader`` with workers.

    Raises:
        RuntimeError: torch raises it when it finds the worker dead.
    """
    worker = next(each for each in iterator._workers if each.is_alive())
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # torch's SIGCHLD handler asks how it ended
    _use_up(iterator)


def _use_up(iterator: WorkersIterator) -> None:
    for _ in iterator:
        pass
