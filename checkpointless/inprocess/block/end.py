"""How a run of the re-executable code block ended, and what is kept of the exception that ended it."""

from __future__ import annotations

import gc
import traceback

import torch

from checkpointless.inprocess.exceptions import RankShouldRestart

_VICTIM_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL",
    "TCPStore",
    "c10d",
)


def is_return(error: BaseException | None) -> bool:
    """Return whether the block ended normally: it returned, or left by ``sys.exit()`` or ``sys.exit(0)``.

    A subclass of ``SystemExit`` does not count: Lightning ends a process that received SIGTERM with one.
    """
    return error is None or (type(error) is SystemExit and error.code in (None, 0))


def exit_code(leaving: SystemExit) -> int:
    """Return the exit code that Python gives a process that ends by ``leaving``; for a text it is 1."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def is_victim(error: BaseException) -> bool:
    """Return whether ``error`` says that a peer or the store went away, rather than that this rank failed."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RankShouldRestart) or type(seen).__name__.startswith("Dist"):
            return True
        text = str(seen)
        if isinstance(seen, (RuntimeError, OSError)) and any(mark in text for mark in _VICTIM_MARKS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def make_room(error: BaseException | None) -> bool:
    """Free what the block that ``error`` ended has built, if it got no more memory.

    This is for a block whose training has not begun: what clears its frames also leaves its loops.

    Returns:
        Whether it got no more memory.
    """
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return False
    forget_frames(error)
    gc.collect()
    return True


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames of ``error`` and of its causes, whose locals hold the old trainer, model and optimizer."""
    pending = [error]
    while pending:
        each = pending.pop()
        if each is None:
            continue
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
        pending += [each.__cause__, each.__context__]
        each.__cause__ = each.__context__ = None
