"""A clock that stands still while its process is paused, so that no one is blamed for what was not heard then."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_S = 0.5  # a loop that is running reads its clock more often than this


class AwakeClock:
    """Counts the seconds for which the loop that reads it was running, so that limits do not include its pauses.

    If more than ``most_s`` has passed between two readings, this process was stopped, starved or blocked, and could
    not hear what others sent meanwhile: the clock advances by no more.
    """

    def __init__(self, most_s: float = _MOST_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._read_at_s = self._now_s = clock()

    def __call__(self) -> float:
        """Return the seconds since the origin of the underlying clock, without the pauses."""
        at_s = self._clock()
        self._now_s += min(max(at_s - self._read_at_s, 0.0), self._most_s)
        self._read_at_s = at_s
        return self._now_s
