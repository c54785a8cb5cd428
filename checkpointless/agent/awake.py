"""A clock that stands still while its own process does: what a paused loop did not hear, nobody failed to say."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_S = 0.5  # a loop that runs reads its clock more often


class AwakeClock:
    """Seconds for which the loop that reads it was running; limits that are measured with it count no own pause.

    Between two readings it advances by the time that has passed, but never by more than ``most_s``: where more
    has passed, this process was stopped, starved or blocked, and with it the ears for what others said meanwhile.

    Args:
        most_s: more than this between two readings is a pause.
        clock: the one beneath.
    """

    def __init__(self, most_s: float = MOST_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._read_at_s = self._now_s = clock()

    def __call__(self) -> float:
        """Seconds, from the same beginning as the clock beneath."""
        at_s = self._clock()
        self._now_s += min(max(at_s - self._read_at_s, 0.0), self._most_s)
        self._read_at_s = at_s
        return self._now_s
