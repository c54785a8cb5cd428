"""The processes that write a rank's part of a checkpoint: one that is killed is noticed, and leaves nobody waiting.

Megatron-core counts what its writers say. If one is killed, for example because the memory is used up, the rank or
the process that writes in the background waits for ever, and no later background save is finished.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from checkpointless.integrations.compat.megatron import disable_gc

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

_PR_SET_PDEATHSIG = 1
_ENDS_S = 5.0


class _Report:
    """A writer's connection to its rank; it stands for both of the queues that Megatron-core gives a writer."""

    def __init__(self, connection: Connection) -> None:
        self.put = connection.send

    def get(self) -> None:
        """Do nothing: nobody counts."""

    task_done = get


@disable_gc()
def write_buckets(
    transforms: Sequence[Any], use_msc: bool, rank: int, buckets: Sequence[Any], results: Queue[Any]
) -> None:
    """Write a rank's part of a checkpoint, each bucket in a separate process.

    It takes the place of ``FileSystemWriterAsync.write_preloaded_data_multiproc``.

    Args:
        transforms: what Megatron-core does to each item.
        use_msc: whether NVIDIA's Multi-Storage Client opens the files.
        results: the queue that gets what each writer says, by its number, or the first error.
    """
    context = multiprocessing.get_context("fork")
    writers: list[tuple[Any, Connection]] = []
    said: list[Any] = []
    try:
        for number, bucket in enumerate(buckets):
            receiver, sender = context.Pipe(duplex=False)
            writer = context.Process(target=_write, args=(transforms, use_msc, number, bucket, sender))
            writer.start()
            sender.close()  # so that the receiver ends with the process
            writers.append((writer, receiver))
        said = [_said(*each) for each in writers]
    except OSError as error:  # no process could be started
        said = [error]
    finally:
        for writer, receiver in writers:
            writer.kill()  # it has ended or is about to, unless a fault came
            writer.join(_ENDS_S)
            receiver.close()
    errors = [each for each in said if isinstance(each, Exception)]
    results.put(errors[0] if errors else dict(enumerate(said)))


def _said(writer: Any, receiver: Connection) -> Any:
    """Wait for a writer, and return its results or its error."""
    try:
        return receiver.recv()[1]
    except EOFError:
        writer.join(_ENDS_S)
        code = writer.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RuntimeError(f"the process that wrote a part of it ended with {how}")


def _write(transforms: Sequence[Any], use_msc: bool, number: int, bucket: Any, sender: Connection) -> None:
    """Be a writer, which ends with the process that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    report = _Report(sender)
    more = {"use_msc": True} if use_msc else {}
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, report, report, use_fsync=True, **more)
