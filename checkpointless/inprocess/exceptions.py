"""Exceptions that end a run of the re-executable code block."""

from __future__ import annotations


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
