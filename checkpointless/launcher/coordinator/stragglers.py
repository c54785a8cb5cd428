"""Which ranks are slow, by what each does by itself in a step: a pure rule over the newest steps of all ranks.

A rank is compared with the ranks of its role, which do the same work, so uneven pipeline stages accuse nobody. One
without such peers is compared with itself some time ago, and with how that has changed for all others.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from checkpointless.launcher.protocol.board import PaceReading, PaceRing
from checkpointless.launcher.protocol.node_messages import RankPace

_LEAST = 8  # steps that are known of a rank before it is compared
_CONFIRMED = 4  # steps after which it is still slow
_FACTOR, _OVER = 1.5, 1.2  # as slow as that, and no longer so
_SPREADS = 6.0  # above the median of its peers
_NOISE = 3.0  # above it, in spreads of the steps of a rank
_TO_SIGMA = 1.4826  # of a median absolute deviation
_LEAST_US = 2000.0
_PAST, _OLD_ENOUGH = 16, 3  # windows that are kept of a rank, and how many are needed


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


@dataclass
class _Past:
    """What is known of a rank's earlier steps."""

    own_us: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))
    data_us: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))
    at: int = 0  # steps when the newest were taken
    suspected_at: int | None = None

    def take(self, pace: RankPace) -> None:
        """Keep the medians of a window that shares no step with the one before."""
        if pace.steps >= self.at + PaceRing.SIZE:
            self.at = pace.steps
            self.own_us.append(pace.own_us)
            self.data_us.append(pace.data_us)


@dataclass(frozen=True)
class _Usual:
    own_us: float
    data_us: float
    spread_us: float


class StragglerRule:
    """Finds slow ranks, each once until it is no longer slow."""

    def __init__(self) -> None:
        self._past: dict[int, _Past] = {}
        self.found: dict[int, Straggler] = {}

    def forget(self) -> list[int]:
        """Forget everything, because a generation begins; return the ranks that were slow."""
        slow = list(self.found)
        self._past, self.found = {}, {}
        return slow

    def look(self, paces: Mapping[int, RankPace]) -> tuple[list[Straggler], list[int]]:
        """Compare the ranks, of which ``paces`` has the newest; return those found now, and those slow no more."""
        known = {rank: pace for rank, pace in paces.items() if pace.steps >= _LEAST}
        roles: dict[int, list[RankPace]] = {}
        for pace in known.values():
            roles.setdefault(pace.role, []).append(pace)
        found, over = [], []
        for rank, pace in known.items():
            past = self._past.setdefault(rank, _Past())
            peers = [each for each in roles[pace.role] if each is not pace]
            usual = _of_peers(peers) if peers else self._of_past(pace, past, known)
            if usual is not None and _is_slow(pace, usual):
                if past.suspected_at is None:
                    past.suspected_at = pace.steps
                if pace.steps >= past.suspected_at + _CONFIRMED and rank not in self.found:
                    self.found[rank] = _straggler(pace, usual)
                    found.append(self.found[rank])
                continue
            past.suspected_at = None
            past.take(pace)
            if rank in self.found and (usual is None or pace.own_us < _OVER * usual.own_us):
                del self.found[rank]
                over.append(rank)
        return found, over

    def _of_past(self, pace: RankPace, past: _Past, known: Mapping[int, RankPace]) -> _Usual | None:
        """Return what a rank without peers takes usually, if the work of all has changed as that of the others."""
        changes = [
            each.own_us / max(median(theirs.own_us), 1.0)
            for rank, each in known.items()
            if each is not pace
            and (theirs := self._past.get(rank)) is not None
            and len(theirs.own_us) >= _OLD_ENOUGH
        ]
        if len(past.own_us) < _OLD_ENOUGH or not changes:
            return None
        change = max(1.0, median(changes))
        own_us = median(past.own_us)
        spread_us = max(_deviation(past.own_us, own_us) * _SPREADS, pace.spread_us * _NOISE)
        return _Usual(own_us * change, median(past.data_us) * change, spread_us)


def _of_peers(peers: Sequence[RankPace]) -> _Usual:
    """Return what the ranks of a role take in the middle."""
    own_us = median(each.own_us for each in peers)
    data_us, noise_us = (_median_of(peers, operator.attrgetter(name)) for name in ("data_us", "spread_us"))
    spread_us = _deviation([each.own_us for each in peers], own_us) * _SPREADS
    return _Usual(own_us, data_us, max(spread_us, noise_us * _NOISE))


def _straggler(pace: RankPace, usual: _Usual) -> Straggler:
    is_data = pace.data_us - usual.data_us > (pace.own_us - usual.own_us) / 2
    return Straggler(pace.number, pace.steps, pace.own_us, usual.own_us, pace.data_us, is_data)


def _is_slow(pace: RankPace, usual: _Usual) -> bool:
    excess_us = pace.own_us - usual.own_us
    return excess_us >= max((_FACTOR - 1) * usual.own_us, usual.spread_us, _LEAST_US)


def _median_of(peers: Sequence[RankPace], value: Callable[[RankPace], float]) -> float:
    return median(map(value, peers))


def _deviation(values: Sequence[float] | deque[float], middle: float) -> float:
    return _TO_SIGMA * median(abs(each - middle) for each in values)


def pace_of(rank: int, reading: PaceReading) -> RankPace:
    """Return the medians of a rank's newest steps, of which there is one at least, and how far steps are away."""
    own_s = median(reading.own)
    spread_s, data_s = _deviation(reading.own, own_s), median(reading.data)
    return RankPace(rank, reading.role, reading.steps, *(int(each * 1e6) for each in (own_s, spread_s, data_s)))
