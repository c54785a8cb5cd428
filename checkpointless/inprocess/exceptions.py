"""Exceptions that end a run of the re-executable code block, and what any exception says of itself."""

from __future__ import annotations

import gc
import traceback

import torch

from checkpointless.observability.telemetry.wording import printable

_NAME_CHARACTERS = 200


class RankShouldRestart(BaseException):
    """Raised in the main thread of a rank that has to leave the block because of a fault on this or another rank.

    It is a ``BaseException``, so that an ``except Exception`` in user code cannot swallow it.
    """


class HealthCheckError(RuntimeError):
    """A health check rejected this process, which must be replaced by a new one."""


class InternalError(RuntimeError):
    """The engine itself cannot continue in this process; the message says why."""


class UnrecoverableError(RuntimeError):
    """No recovery level is left, so the job must end with this message."""


class StateLostError(UnrecoverableError):
    """No rank holds the state any more.

    Args:
        reason: what is missing, in one line; the message adds what could help.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"{reason}; next time, replicas, copies (CheckpointManager(tiers=[...])) or "
            "allow_restart_from_scratch=True could help"
        )


def words_of(error: BaseException) -> tuple[str, str]:
    """Return the name of an exception's type in one line (it may be any), and what it says, or why it cannot."""
    name = printable(type(error).__name__, _NAME_CHARACTERS)
    try:
        return name, str(error)
    except Exception as another:  # noqa: BLE001 - whatever a script's __str__ raises
        return name, f"<its __str__ raised {printable(type(another).__name__, _NAME_CHARACTERS)}>"


def line_of(error: BaseException) -> str:
    return ": ".join(words_of(error))


_VICTIM_MARKS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL",
    "TCPStore",
    "c10d",
)
_HOST_IS_FULL = "DefaultCPUAllocator: can't allocate memory"  # torch has no class for it on the CPU


def is_victim(error: BaseException | None) -> bool:
    """Return whether ``error`` says that a peer or the store went away, rather than that this rank failed."""
    chain: list[BaseException] = []
    while error is not None and not any(error is each for each in chain):
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(
        isinstance(each, RankShouldRestart)
        or type(each).__name__.startswith("Dist")
        or (isinstance(each, (RuntimeError, OSError)) and any(mark in words_of(each)[1] for mark in _VICTIM_MARKS))
        for each in chain
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether ``error`` says that the device or the host had no more memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _HOST_IS_FULL in words_of(error)[1]
    )


def make_room(error: BaseException | None) -> bool:
    """Free what the block built, before its training, if it had no more memory (clears loops); return whether."""
    if not is_out_of_memory(error):
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
