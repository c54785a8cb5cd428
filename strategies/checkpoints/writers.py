"""The processes that write a rank's part of a checkpoint: one that dies is noticed, and leaves nobody waiting.

Megatron-core waits for its writers by counting what they say. A writer that is killed, for example because the
memory is used up, says nothing, so the rank would wait for ever.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from megatron.core.dist_checkpointing.strategies.filesystem_async import (
    FileSystemWriterAsync,
    WriteBucket,
    _disable_gc,
)

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_ENDS_S = 5.0


class Results(Protocol):
    """The queue by which the rank learns of its writers."""

    def put(self, results: object) -> None:
        """Tell the rank."""


class _Report:
    """A writer's way to say what it has written; it stands for both of the queues that Megatron-core gives it.

    Args:
        connection: where to say it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, result: object) -> None:
        """Say what was written."""
        self._connection.send(result)

    def get(self) -> None:
        """Do nothing: nobody counts."""

    def task_done(self) -> None:
        """Do nothing: nobody counts."""


@_disable_gc()
def write_buckets(
    transforms: Sequence[object], use_msc: bool, rank: int, buckets: Sequence[WriteBucket], results: Results
) -> None:
    """Write a rank's part of a checkpoint, each bucket in a process of its own.

    It takes the place of ``FileSystemWriterAsync.write_preloaded_data_multiproc``.

    Args:
        transforms: what Megatron-core does to each item.
        use_msc: whether NVIDIA's Multi-Storage Client opens the files.
        rank: the rank whose part it is.
        buckets: what to write, by file.
        results: the queue that gets what each writer says, by its number, or the error.
    """
    results.put(_results(transforms, use_msc, buckets))


def _results(
    transforms: Sequence[object], use_msc: bool, buckets: Sequence[WriteBucket]
) -> dict[int, Any] | Exception:
    """Return what each writer says, by its number, or the first error."""
    context = multiprocessing.get_context("fork")
    writers: list[tuple[Any, Connection]] = []
    found: dict[int, Any] = {}
    error: Exception | None = None
    try:
        for number, bucket in enumerate(buckets):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_write, args=(transforms, use_msc, number, bucket, sender))
            process.start()
            sender.close()  # so that the receiver ends with the process
            writers.append((process, receiver))
        for number, (process, receiver) in enumerate(writers):
            said = _said(process, receiver)
            if isinstance(said, Exception):
                error = error or said
            else:
                found[number] = said
    except OSError as failure:  # no process could be started
        return failure
    finally:
        for process, receiver in writers:
            if process.is_alive():  # they have all ended, unless a fault came
                process.kill()
                process.join(_ENDS_S)
            receiver.close()
    return error or found


def _said(process: Any, receiver: Connection) -> Any:
    """Wait for a writer's end, and return its results or its error."""
    try:
        _, said = receiver.recv()
    except EOFError:
        process.join(_ENDS_S)
        how = f"signal {-process.exitcode}" if (process.exitcode or 0) < 0 else f"exit code {process.exitcode}"
        return RuntimeError(f"the process that wrote a part of it ended with {how}")
    process.join(_ENDS_S)
    return said


def _write(transforms: Sequence[object], use_msc: bool, number: int, bucket: Any, sender: Connection) -> None:
    """Be a writer, which ends with the process that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    report = _Report(sender)
    more = {"use_msc": True} if use_msc else {}
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, report, report, use_fsync=True, **more)
