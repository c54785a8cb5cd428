"""End the worker processes of torch's data loaders, and free threads that would wait for what they leave.

A worker shares an event with the process that started it, and the event has a lock. The worker takes the lock for
each batch, to see whether it has to end; the other process takes it to tell the worker so (``_shutdown_workers``).
A worker that is killed while it holds the lock never releases it, and the other process waits forever in C, where
no interruption is handled (``benchmarks/soak/worker_locks.py`` counts how often). A read of a message that was only
partly written never ends either, because the reading process itself holds the other end of the pipe.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from multiprocessing import connection
from typing import TYPE_CHECKING, cast

from torch.utils.data._utils import signal_handling

from checkpointless.system import shared_memory

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from multiprocessing import util
from pathlib import Path

logger = logging.getLogger(__name__)

_END_S = 1.0  # a worker that is asked to end does so within milliseconds
_DEATH_S = 10.0  # one that is killed does so as soon as it is scheduled
_LOCK_S = 1.0  # a living process holds the lock for microseconds


def end_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """End the workers of one iterator, and free threads that would wait for what the workers held.

    This takes milliseconds, twelve seconds at most. Any thread may call it.

    Args:
        iterator: torch's iterator over a data loader with workers.
    """
    workers = list(iterator._workers)
    _watch_no_more(iterator)
    for worker in workers:
        if _is_alive(worker):
            worker.terminate()
    if not _have_ended(workers, _END_S):
        for worker in workers:  # a newly forked one has its parent's handlers and may ignore SIGTERM
            if _is_alive(worker):
                worker.kill()
        if not _have_ended(workers, _DEATH_S):
            logger.warning("a data-loader worker could not be killed")
            return
    _free_lock(iterator)
    _end_messages(iterator)
    shared_memory.remove(cast(int, worker.pid) for worker in workers)
    try:
        _remove_unused_sockets()
    except OSError as error:
        logger.warning("sockets of data-loader workers are not removed: %s", error)


def _watch_no_more(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Keep torch's SIGCHLD handler, which raises wherever the main thread is, from reporting a failure."""
    if getattr(iterator, "_worker_pids_set", False):
        iterator._worker_pids_set = False
        with contextlib.suppress(ValueError):  # the main thread did so at the same time
            signal_handling._remove_worker_pids(id(iterator))


def _have_ended(workers: Sequence[BaseProcess], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    for worker in workers:
        worker.join(max(0.0, deadline_s - time.monotonic()))
    return not any(_is_alive(worker) for worker in workers)


def _is_alive(worker: BaseProcess) -> bool:
    """Return whether ``worker`` is alive, by its sentinel as well.

    ``Process.is_alive`` alone stays true forever if the main thread was interrupted while it reaped the worker.
    """
    return worker.is_alive() and not connection.wait([worker.sentinel], 0)


def _free_lock(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Release the event's lock if a dead worker holds it."""
    condition = getattr(getattr(iterator, "_workers_done_event", None), "_cond", None)
    if condition is None:
        return
    if not condition.acquire(True, _LOCK_S):
        logger.warning("a data-loader worker died while it held a lock; the lock is released")
    with contextlib.suppress(ValueError):  # the main thread held it after all and has released it
        condition.release()


def _end_messages(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Let the reader of a message that will never be complete reach the end of the stream."""
    if getattr(iterator, "_pin_memory_thread", None) is None:  # the pin-memory thread is told by a message to end
        writer = getattr(getattr(iterator, "_worker_result_queue", None), "_writer", None)
        if writer is not None:
            writer.close()


_BOUND = Path("/proc/net/unix")  # unix(7): the eighth field is the path that a socket is bound to


def share_socket_folder() -> None:
    """Make the processes that this one starts from now on create their sockets in this process's folder."""
    try:
        util.get_temp_dir()
    except OSError as error:  # data loaders with workers report it, too; others need no folder
        logger.warning("no temporary folder for sockets of data-loader workers: %s", error)


def _remove_unused_sockets() -> None:
    """Remove the sockets in this process's folder whose creators have ended.

    Raises:
        OSError: there is no temporary folder, or the kernel does not report which sockets are bound.
    """
    found = [str(path) for path in Path(util.get_temp_dir()).glob("listener-*")]
    if not found:
        return
    lines = _BOUND.read_text(errors="surrogateescape").splitlines()
    bound = {fields[7] for fields in (line.split(maxsplit=7) for line in lines) if len(fields) == 8}
    for path in found:
        if path not in bound:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
