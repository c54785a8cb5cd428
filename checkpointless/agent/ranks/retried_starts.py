"""Starts of processes that the kernel refuses for the moment: they are tried again for a while, then given up."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

RETRY_S = 30.0  # the ranks that end meanwhile give memory and process numbers back
PAUSE_S = 0.2
_LIMITS = "raise the limits on processes (ulimit -u, pids.max of the cgroup)"
_MEMORY = "give the job more memory (memory.max of the cgroup, vm.overcommit_memory)"
_DESCRIPTORS = "raise the limit on open files (ulimit -n)"
#: What may pass by itself, and what to do where it does not.
_REMEDIES = {
    errno.EAGAIN: _LIMITS,
    errno.ENOMEM: _MEMORY,
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
}


@dataclass(frozen=True)
class Refused:
    """The kernel has refused a rank's process.

    Attributes:
        why: why, in one line; once the start is given up, with what to do. "" if the start was cancelled.
        is_final: whether the start is given up; otherwise it is tried again.
    """

    rank: int
    incarnation: int
    why: str
    is_final: bool


@dataclass
class _Start:
    rank: int
    incarnation: int
    attempt: Callable[[], None]
    descriptors: tuple[int, ...]
    by_s: float
    next_s: float = 0.0
    is_told: bool = False


class RetriedStarts:
    """Starts processes of ranks, again and again for :data:`RETRY_S` if the kernel refuses them.

    Args:
        tell: called with each start that is refused: when it is refused first, and when it is given up.
        clock: clock of the attempts, in seconds.
    """

    def __init__(self, tell: Callable[[Refused], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._waiting: list[_Start] = []

    @property
    def pause_s(self) -> float | None:
        """Seconds until :meth:`go_on` is to be called; None: nothing waits."""
        if not self._waiting:
            return None
        return max(0.0, min(start.next_s for start in self._waiting) - self._clock())

    def descriptors(self) -> list[int]:
        """Return the descriptors of the starts that wait: a process of another rank must not keep them."""
        return [each for start in self._waiting for each in start.descriptors]

    def begin(
        self, rank: int, incarnation: int, attempt: Callable[[], None], descriptors: tuple[int, ...] = ()
    ) -> None:
        """Start a process, now or later.

        Args:
            attempt: starts it; it raises an OSError if the kernel refuses.
            descriptors: descriptors that are closed once the process is started or given up.
        """
        self._try(_Start(rank, incarnation, attempt, descriptors, self._clock() + RETRY_S))

    def go_on(self) -> None:
        """Try again what has waited for :data:`PAUSE_S`."""
        now_s = self._clock()
        for start in [each for each in self._waiting if each.next_s <= now_s]:
            self._waiting.remove(start)
            self._try(start)

    def cancel(self, rank: int, incarnation: int) -> None:
        """Give up a start, if it waits."""
        for start in [each for each in self._waiting if (each.rank, each.incarnation) == (rank, incarnation)]:
            self._waiting.remove(start)
            self._give_up(start, "")

    def close(self) -> None:
        """Forget all starts that wait."""
        waiting, self._waiting = self._waiting, []
        for start in waiting:
            _close(start)

    def _try(self, start: _Start) -> None:
        try:
            start.attempt()
        except OSError as error:
            self._refused(start, error)
        else:
            _close(start)

    def _refused(self, start: _Start, error: OSError) -> None:
        why = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0)
        now_s = self._clock()
        if remedy is None:
            self._give_up(start, why)
        elif now_s >= start.by_s:
            self._give_up(start, f"{why}, for {RETRY_S:g} s; {remedy}")
        else:
            start.next_s = now_s + PAUSE_S
            self._waiting.append(start)
            if not start.is_told:
                start.is_told = True
                self._tell(Refused(start.rank, start.incarnation, why, is_final=False))

    def _give_up(self, start: _Start, why: str) -> None:
        logger.warning("rank %d: process %d is not started: %s", start.rank, start.incarnation, why or "cancelled")
        _close(start)
        self._tell(Refused(start.rank, start.incarnation, why, is_final=True))


def _close(start: _Start) -> None:
    for descriptor in start.descriptors:
        os.close(descriptor)
