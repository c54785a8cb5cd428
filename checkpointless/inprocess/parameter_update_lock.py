"""The lock around the local optimizer update, the only time at which a rank must not be interrupted."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

from checkpointless.inprocess.exceptions import RankShouldRestart

_UNKNOWN_STEP = -1


@dataclass(frozen=True)
class CommitState:
    """A rank's steps: the last whole one (-1: none), ``ready`` for the next, ``torn`` by an update that failed."""

    committed: int
    ready: bool
    torn: bool


class ParameterUpdateLock:
    """A lock that brackets the local optimizer update and knows which step it committed.

    The fault thread calls :meth:`close`: from then on no update can begin, and one that has begun finishes first.
    No call waits longer than its time limit, and an update that fails is reported at once.
    """

    def __init__(self) -> None:
        # Each thread writes its own flag first, then reads the other's: one of them sees what the other does.
        self._closed = False  # written by the fault thread
        self._in_update = False  # written by the training thread
        self._ended = threading.Event()  # no update is in progress since the lock was closed
        self._committed = _UNKNOWN_STEP
        self._ready_step: int | None = None
        self._torn = False

    @property
    def committed(self) -> int:
        """The last committed optimizer step (-1: none known)."""
        return self._committed

    def state(self) -> CommitState:
        """Return a consistent view of the commit state. Call this only when no update can be in progress."""
        ready = self._ready_step == self._committed + 1 and not self._torn
        return CommitState(self._committed, ready, self._torn)

    def set_committed(self, step: int) -> None:
        """Record that the rank holds the complete state after ``step`` (start of training, or a restore)."""
        self._ready_step = None
        self._torn = False
        self._committed = step

    def forget(self) -> None:
        """Record that the rank holds no usable state (it is about to build a new one)."""
        self.set_committed(_UNKNOWN_STEP)

    def open(self) -> None:
        """Allow updates again, at the entry of a new generation."""
        self._in_update = False
        self._ended.clear()
        self._closed = False

    def close(self, timeout: timedelta) -> bool:
        """Keep new updates from beginning and wait for the one in progress to end; return False if it does not in
        time.
        """
        self._closed = True
        return not self._in_update or self._ended.wait(timeout.total_seconds())

    def mark_ready(self, step: int) -> None:
        """Record that the gradients of ``step`` are final: this rank could apply them without other ranks."""
        self._ready_step = step

    def update(self, step: int) -> AbstractContextManager[None]:
        """Bracket the local update of ``step``; leaving it without an error commits the step.

        Raises:
            RankShouldRestart: upon entry; a fault is being handled, so the update must not begin.
        """
        return _Update(self, step)

    def _begin(self, step: int) -> None:
        # Until the flag is right nothing is called, so no exception that another thread raises here can come.
        self._in_update = True
        if not self._closed:  # from here on, the fault thread waits and does not interrupt
            return
        self._in_update = False
        self._ended.set()
        raise RankShouldRestart(f"a fault is being handled; step {step} is not applied")

    def _end(self, step: int, failed: bool) -> None:
        if failed:
            self._torn = True
        else:
            self._ready_step = None
            self._committed = step
        self._in_update = False
        if self._closed:
            self._ended.set()


class _Update(AbstractContextManager[None]):
    """One update in the lock; a class, since a generator costs more at each step."""

    __slots__ = ("_lock", "_step")

    def __init__(self, lock: ParameterUpdateLock, step: int) -> None:
        self._lock = lock
        self._step = step

    def __enter__(self) -> None:
        self._lock._begin(self._step)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._lock._end(self._step, kind is not None)
