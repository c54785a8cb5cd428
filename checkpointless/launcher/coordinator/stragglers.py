"""Which ranks are slow, by what each does by itself in a step: a pure rule over the newest steps of all ranks.

A rank is compared with the ranks of its role, which do the same work, so uneven pipeline stages accuse nobody, nor
does a rank without such peers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from checkpointless.launcher.protocol.board import PaceReading
from checkpointless.launcher.protocol.messages import RankPace

_LEAST = 8  # steps that are known of a rank before it is compared
_CONFIRMED = 4  # steps after which it is still slow
_FACTOR, _OVER = 1.5, 1.2  # as slow as that, and no longer so
_SPREADS = 6.0  # above the median of its peers
_NOISE = 3.0  # above it, in spreads of the steps of a rank
_TO_SIGMA = 1.4826  # of a median absolute deviation
_LEAST_US = 2000.0


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow.

    Attributes:
        own_us: the median of what it does by itself in a step, in microseconds.
        usual_us: what it would take if it were not slow.
        data_us: how much of it goes by until the batch is there.
        is_data: whether most of what it takes too long is that.
    """

    rank: int
    steps: int
    own_us: float
    usual_us: float
    data_us: float
    is_data: bool

    @property
    def why(self) -> str:
        """What is slow, as a label."""
        return "data" if self.is_data else "compute"

    def line(self, node: int) -> str:
        """Return what the terminal shows."""
        what = f"waits {self.data_us / 1e6:.3g} s for its batch" if self.is_data else "computes slowly"
        return (
            f"rank {self.rank} on node {node} is slow and the others wait for it: it {what}; a step takes it "
            f"{self.own_us / 1e6:.3g} s, not {self.usual_us / 1e6:.3g} s"
        )


@dataclass(frozen=True)
class _Usual:
    own_us: float
    data_us: float
    spread_us: float


class _Sorted:
    """Numbers that are sorted once, for the medians of all but one of them."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = sorted(values)

    def __len__(self) -> int:
        return len(self.values)

    def median_without(self, value: float) -> float:
        """Return the median of the others; ``value`` is one of at least two."""
        at, others = bisect_left(self.values, value), len(self.values) - 1
        low, high = (others - 1) // 2, others // 2
        return (self.values[low + (low >= at)] + self.values[high + (high >= at)]) / 2


class _Role:
    """What the ranks of a role take."""

    def __init__(self, paces: Sequence[RankPace]) -> None:
        self._own = _Sorted(each.own_us for each in paces)
        self._data = _Sorted(each.data_us for each in paces)
        self._noise = _Sorted(each.spread_us for each in paces)
        self._away: dict[float, _Sorted] = {}  # from a median: without one rank, there are at most three

    def __len__(self) -> int:
        return len(self._own)

    def usual_without(self, pace: RankPace) -> _Usual:
        """Return what the peers of a rank take in the middle."""
        own_us = self._own.median_without(pace.own_us)
        if own_us not in self._away:
            self._away[own_us] = _Sorted(abs(each - own_us) for each in self._own.values)
        spread_us = _TO_SIGMA * self._away[own_us].median_without(abs(pace.own_us - own_us)) * _SPREADS
        noise_us = self._noise.median_without(pace.spread_us) * _NOISE
        return _Usual(own_us, self._data.median_without(pace.data_us), max(spread_us, noise_us))


class StragglerRule:
    """Finds slow ranks, each once until it is no longer slow."""

    def __init__(self) -> None:
        self._suspected_at: dict[int, int] = {}  # by rank: its steps when it was slow first
        self.found: dict[int, Straggler] = {}

    def forget(self) -> list[int]:
        """Forget everything, because a generation begins; return the ranks that were slow."""
        slow = list(self.found)
        self._suspected_at, self.found = {}, {}
        return slow

    def look(self, paces: Mapping[int, RankPace]) -> tuple[list[Straggler], list[int]]:
        """Compare the ranks, of which ``paces`` has the newest; return those found now, and those slow no more."""
        known = {rank: pace for rank, pace in paces.items() if pace.steps >= _LEAST}
        of_role: dict[int, list[RankPace]] = {}
        for pace in known.values():
            of_role.setdefault(pace.role, []).append(pace)
        roles = {role: _Role(each) for role, each in of_role.items()}
        found, over = [], []
        for rank, pace in known.items():
            role = roles[pace.role]
            usual = role.usual_without(pace) if len(role) > 1 else None
            if usual is not None and _is_slow(pace, usual):
                since = self._suspected_at.setdefault(rank, pace.steps)
                if pace.steps >= since + _CONFIRMED and rank not in self.found:
                    self.found[rank] = _straggler(pace, usual)
                    found.append(self.found[rank])
                continue
            self._suspected_at.pop(rank, None)
            if rank in self.found and (usual is None or pace.own_us < _OVER * usual.own_us):
                del self.found[rank]
                over.append(rank)
        return found, over


def _straggler(pace: RankPace, usual: _Usual) -> Straggler:
    is_data = pace.data_us - usual.data_us > (pace.own_us - usual.own_us) / 2
    return Straggler(pace.number, pace.steps, pace.own_us, usual.own_us, pace.data_us, is_data)


def _is_slow(pace: RankPace, usual: _Usual) -> bool:
    excess_us = pace.own_us - usual.own_us
    return excess_us >= max((_FACTOR - 1) * usual.own_us, usual.spread_us, _LEAST_US)


def _deviation(values: Sequence[float], middle: float) -> float:
    return _TO_SIGMA * median(abs(each - middle) for each in values)


def pace_of(rank: int, reading: PaceReading) -> RankPace:
    """Return the medians of a rank's newest steps, of which there is one at least, and how far steps are away."""
    own_s = median(reading.own)
    spread_s, data_s = _deviation(reading.own, own_s), median(reading.data)
    return RankPace(rank, reading.role, reading.steps, *(int(each * 1e6) for each in (own_s, spread_s, data_s)))
