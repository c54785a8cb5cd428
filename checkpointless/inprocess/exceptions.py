"""What ends a run of the re-executable code block."""

from __future__ import annotations


class RankShouldRestart(BaseException):
    """Raised in the main thread of a rank that has to leave the block because of a fault, its own or another's.

    A ``BaseException``, so that an ``except Exception`` in user code cannot swallow it.
    """


class HealthCheckError(RuntimeError):
    """A health check refused this process: it must be replaced by a new one."""


class InternalError(RuntimeError):
    """The engine itself cannot go on in this process; the message says why."""


class UnrecoverableError(RuntimeError):
    """No rung is left: the job must end, with this message as its last word."""
