"""Which ranks are slow, by what each does by itself in a step.

A rank is compared with the ranks of its role, which do the same work, so uneven pipeline stages accuse nobody, nor
does a rank without such peers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from checkpointless.launcher.coordinator.job import Job, Node, Phase
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.messages import MoveNews, Paces, RankPace
from checkpointless.observability.telemetry.event_names import EventName

_LEAST = 8  # steps that are known of a rank before it is compared
_CONFIRMED = 4  # steps after which it is still slow
_FACTOR, _OVER = 1.5, 1.2  # as slow as that, and no longer so
_SPREADS = 6.0  # above the median of its peers
_NOISE = 3.0  # above it, in spreads of the steps of a rank
TO_SIGMA = 1.4826  # of a median absolute deviation
_LEAST_US = 2000.0


class _Straggler(NamedTuple):
    """A slow rank: what it does by itself in a step, what is usual, and how long it waits for its batch."""

    rank: int
    own_us: float
    usual_us: float
    data_us: float
    is_data: bool  # whether that is most of what it takes too long

    def line(self, node: int) -> str:
        """Return what the terminal shows."""
        what = f"waits {self.data_us / 1e6:.3g} s for its batch" if self.is_data else "computes slowly"
        return (
            f"rank {self.rank} on node {node} is slow and the others wait for it: it {what}; a step takes it "
            f"{self.own_us / 1e6:.3g} s, not {self.usual_us / 1e6:.3g} s"
        )


def _median_without(values: Sequence[float], value: float) -> float:
    """Return the median of sorted values without ``value``, which is one of at least two."""
    at, others = bisect_left(values, value), len(values) - 1
    low, high = (others - 1) // 2, others // 2
    return (values[low + (low >= at)] + values[high + (high >= at)]) / 2


class _Role:
    """What the ranks of a role take, sorted once for the medians of all but one of them."""

    def __init__(self, paces: Sequence[RankPace]) -> None:
        self._own = sorted(each.own_us for each in paces)
        self._data = sorted(each.data_us for each in paces)
        self._noise = sorted(each.spread_us for each in paces)
        self._away: dict[float, list[float]] = {}  # from a median: without one rank, there are at most three

    def judge(self, pace: RankPace) -> tuple[_Straggler | None, bool]:
        """Return a rank of the role if it is slow compared with its peers, and whether it is no longer so."""
        if len(self._own) < 2:
            return None, True
        usual_us, usual_data_us = _median_without(self._own, pace.own_us), _median_without(self._data, pace.data_us)
        if usual_us not in self._away:
            self._away[usual_us] = sorted(abs(each - usual_us) for each in self._own)
        excess_us = pace.own_us - usual_us
        spread_us = _SPREADS * TO_SIGMA * _median_without(self._away[usual_us], abs(excess_us))
        noise_us = _NOISE * _median_without(self._noise, pace.spread_us)
        if excess_us < max((_FACTOR - 1) * usual_us, spread_us, noise_us, _LEAST_US):
            return None, pace.own_us < _OVER * usual_us
        is_data = pace.data_us - usual_data_us > excess_us / 2
        return _Straggler(pace.number, pace.own_us, usual_us, pace.data_us, is_data), False


class _Rule:
    """Finds slow ranks, each once until it is no longer slow."""

    def __init__(self) -> None:
        self._suspected_at: dict[int, int] = {}  # by rank: its steps when it was slow first
        self._slow: set[int] = set()

    def forget(self) -> list[int]:
        """Forget everything, because a generation begins; return the ranks that were slow."""
        slow = sorted(self._slow)
        self._suspected_at, self._slow = {}, set()
        return slow

    def look(self, paces: Mapping[int, RankPace]) -> tuple[list[_Straggler], list[int]]:
        """Compare the ranks, of which ``paces`` has the newest; return those found now, and those slow no more."""
        known = {rank: pace for rank, pace in paces.items() if pace.steps >= _LEAST}
        of_role: dict[int, list[RankPace]] = {}
        for pace in known.values():
            of_role.setdefault(pace.role, []).append(pace)
        roles = {role: _Role(each) for role, each in of_role.items()}
        found, over = [], []
        for rank, pace in known.items():
            straggler, is_over = roles[pace.role].judge(pace)
            if straggler is not None:
                since = self._suspected_at.setdefault(rank, pace.steps)
                if pace.steps >= since + _CONFIRMED and rank not in self._slow:
                    self._slow.add(rank)
                    found.append(straggler)
                continue
            self._suspected_at.pop(rank, None)
            if rank in self._slow and is_over:
                self._slow.remove(rank)
                over.append(rank)
        return found, over


class Stragglers:
    """Reports slow ranks, each once until it is as fast as others again, or the generation is over.

    ``leave`` is asked to move each node that a slow rank is on, if that is asked for.

    How much work the comparison is depends on how many ranks there are, not on how many messages: it is done every
    :attr:`EVERY_S` at most if there are :attr:`MANY` ranks or more, and more often if there are few.
    """

    EVERY_S, MANY = 5.0, 1000

    def __init__(self, job: Job, leave: Callable[[int, str, Callable[[MoveNews], None]], None]) -> None:
        self._job, self._leave = job, leave
        self._rule = _Rule()
        self._generation = NO_STEP
        self._paces: dict[int, RankPace] = {}
        self._is_new = False
        self._every_s = self.EVERY_S * min(1.0, len(job.ranks) / self.MANY)
        self._look_at_s = 0.0

    def hear(self, node: Node, message: Paces) -> None:
        """Keep what a node has reported of its ranks."""
        job = self._job
        if message.generation != job.generation or job.phase is not Phase.RUNNING:
            return
        if self._generation != job.generation:
            self._generation, self._paces = job.generation, {}
            self._are_over(self._rule.forget())
        for pace in message.ranks:
            self._paces[job.rank_of(pace.number, node).number] = pace
        self._is_new = True

    def look(self, now_s: float) -> None:
        """Compare the ranks if there is news of them in this generation, and it is time to."""
        job = self._job
        if not self._is_new or self._generation != job.generation or now_s < self._look_at_s:
            return
        self._is_new, self._look_at_s = False, now_s + self._every_s
        found, over = self._rule.look(self._paces)
        on_nodes = {}
        for each in found:
            index = job.ranks[each.rank].node.index
            on_nodes[index] = f"rank {each.rank} is slow"
            why, own_s, usual_s = "data" if each.is_data else "compute", each.own_us / 1e6, each.usual_us / 1e6
            about: dict[str, Any] = {"why": why, "own_s": own_s, "usual_s": usual_s, "step": job.high_water}
            job.incidents.emit(EventName.STRAGGLER, "begin", rank=each.rank, on_node=index, **about)
            job.say(each.line(index))
        for index, why in on_nodes.items() if job.config.move_stragglers else ():
            self._leave(index, why, lambda news: None)
        self._are_over(over)

    def _are_over(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._job.incidents.emit(EventName.STRAGGLER, "end", rank=rank, step=self._job.high_water)
