"""How long things took, as Prometheus counts it: how many took no longer than each of some bounds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Durations"]


@dataclass(frozen=True)
class Durations:
    """A histogram that is replaced, never changed.

    Attributes:
        bounds_s: ascending, in seconds.
        counts: how many took no longer than each bound, and the number of all at the end.
        seconds: of all together.
    """

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    seconds: float = 0.0

    @classmethod
    def none(cls, bounds_s: tuple[float, ...]) -> Durations:
        """Nothing yet."""
        return cls(bounds_s, (0,) * (len(bounds_s) + 1))

    def and_one_of(self, seconds: float) -> Durations:
        """These and one more."""
        more = (*(int(seconds <= bound_s) for bound_s in self.bounds_s), 1)
        return Durations(self.bounds_s, tuple(map(sum, zip(self.counts, more))), self.seconds + seconds)
