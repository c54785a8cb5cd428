"""How a run of the re-executable code block ended, and what is kept of the exception that ended it."""

from __future__ import annotations

import gc
import traceback

import torch

from checkpointless.inprocess.exceptions import RankShouldRestart, text_of
from checkpointless.launcher.protocol.causes import exit_code

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
    return error is None or (type(error) is SystemExit and exit_code(error) == 0)


def is_victim(error: BaseException | None) -> bool:
    """Return whether ``error`` says that a peer or the store went away, rather than that this rank failed."""
    chain: list[BaseException] = []
    while error is not None and not any(error is each for each in chain):
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(
        isinstance(each, RankShouldRestart)
        or type(each).__name__.startswith("Dist")
        or (isinstance(each, (RuntimeError, OSError)) and any(mark in text_of(each) for mark in _VICTIM_MARKS))
        for each in chain
    )


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
