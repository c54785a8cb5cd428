"""Exceptions that end a run of the re-executable code block, and what any exception says of itself."""

from __future__ import annotations

import traceback

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
    """No rung of recovery is left, so the job must end with this message."""


class StateLostError(UnrecoverableError):
    """No rank holds the state any more.

    Args:
        reason: what is missing, in one line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}; next time, replicas, copies (CheckpointManager(tiers=[...])) or "
            "allow_restart_from_scratch=True could help"
        )


def name_of(error: BaseException) -> str:
    """Return the name of an exception's type in one line; a type may have any name."""
    return printable(type(error).__name__, _NAME_CHARACTERS)


def text_of(error: BaseException) -> str:
    """Return what an exception says; if that fails, which is foreign code's to decide, return why."""
    try:
        return str(error)
    except Exception as another:  # noqa: BLE001 - whatever a script's __str__ raises
        return f"<its __str__ raised {name_of(another)}>"


def line_of(error: BaseException) -> str:
    """Return an exception's type and what it says."""
    return f"{name_of(error)}: {text_of(error)}"


def traceback_of(error: BaseException) -> str:
    """Return an exception's traceback with those of its causes; without them if they cannot be written."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - whatever a script's exception raises when it is asked for its notes and parts
        return "".join([*traceback.format_tb(error.__traceback__), line_of(error)])
