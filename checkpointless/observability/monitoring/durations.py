"""Durations as Prometheus counts them: how many took no longer than each of several bounds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Durations"]


@dataclass(frozen=True)
class Durations:
    """A histogram of durations that is replaced, never changed.

    Attributes:
        bounds_s: the upper bounds in seconds, ascending.
        counts: how many durations were no longer than each bound, followed by the number of all durations.
        seconds: the sum of all durations.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: float = 0.0

    @classmethod
    def none(cls, bounds_s: tuple[float, ...]) -> Durations:
        """Return an empty histogram."""
        return cls(bounds_s, (0,) * (len(bounds_s) + 1))

    def and_one_of(self, seconds: float) -> Durations:
        """Return a histogram with one more duration of ``seconds``."""
        more = (*(int(seconds <= bound_s) for bound_s in self.bounds_s), 1)
        return Durations(self.bounds_s, tuple(map(sum, zip(self.counts, more))), self.seconds + seconds)
