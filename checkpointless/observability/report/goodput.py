"""Goodput: the wall time of a job by cause, over all its runs; the seconds of all causes add up to the wall time.

``training`` is what other causes leave of the time between incidents: saves, waits for a slow rank, repeated steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

_NS_PER_S = 1e9
TRAINING, REPEATED, STRAGGLERS, SAVES = "training", "repeated", "stragglers", "saves"
STARTUP, SHUTDOWN, IDLE = "startup", "shutdown", "idle"
#: The causes that are no incidents, and what they are. An incident's cause is how it was noticed.
CAUSES: Mapping[str, str] = {
    TRAINING: "steps that count",
    STARTUP: "until the last rank begins its first step",
    REPEATED: "steps that had been made before",
    STRAGGLERS: "others wait for a slow rank, after it was found",
    SAVES: "training stands still for a checkpoint",
    SHUTDOWN: "after the last step",
    IDLE: "between two runs",
}
_OF_ETTR = (TRAINING, STRAGGLERS, SAVES)


@dataclass(frozen=True)
class Spell:
    """Time that went to one cause, in UTC nanoseconds."""

    cause: str
    begin_ns: int
    end_ns: int
    share: float = 1.0  # how much of the time went to it, from 0 to 1
    # the rank that it went to it for; None if that is not known, or no rank. Likewise its ``node``
    rank: int | None = None
    node: int | None = None
    who: str = ""  # what it was, if that is no rank

    @property
    def seconds(self) -> float:
        """What the cause took."""
        return self.share * (self.end_ns - self.begin_ns) / _NS_PER_S


@dataclass(frozen=True)
class _Loss:
    """Seconds that the whole job lost to one cause because of one rank, or of ``who``."""

    cause: str
    rank: int | None
    node: int | None
    who: str
    seconds: float


@dataclass(frozen=True)
class Goodput:
    """What the wall time of a run, or of a job's runs, went to."""

    begin_ns: int
    end_ns: int
    seconds: Mapping[str, float] = field(default_factory=dict)  # by cause; they add up to :attr:`wall_s`
    lost: tuple[_Loss, ...] = ()  # the parts of them that are known to be for one rank or node, the longest first
    is_known: bool = True  # whether it is known how much of the training counts
    first_step: int | None = None  # the first step, and the newest one; None if not known
    last_step: int | None = None
    step_s: float | None = None  # duration of an undisturbed step, in seconds; None if not known

    @property
    def wall_s(self) -> float:
        """Seconds from the first event to the end."""
        return (self.end_ns - self.begin_ns) / _NS_PER_S

    @property
    def ratio(self) -> float | None:
        """Goodput: the share of the wall time that went to steps that count; None if not known."""
        return self._share((TRAINING,), self.wall_s)

    @property
    def ettr(self) -> float | None:
        """Effective training time over wall time, in which saves and waits for slow ranks count as training."""
        return self._share(_OF_ETTR, self.wall_s)

    @property
    def ettr_while_training(self) -> float | None:
        """ETTR without start-up, shutdown and the time between runs; None if not known."""
        others = sum(self.seconds.get(cause, 0.0) for cause in (STARTUP, SHUTDOWN, IDLE))
        return self._share(_OF_ETTR, self.wall_s - others)

    @property
    def incidents_s(self) -> float:
        """Seconds of incidents, without the steps that were repeated after them."""
        return sum(spent_s for cause, spent_s in self.seconds.items() if cause not in CAUSES)

    def _share(self, causes: Iterable[str], of_s: float) -> float | None:
        if not self.is_known or of_s <= 0:
            return None
        return min(1.0, sum(self.seconds.get(cause, 0.0) for cause in causes) / of_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "goodput": self.ratio,
            "ettr": self.ettr,
            "wall_s": self.wall_s,
            "seconds": dict(self.seconds),
            "lost": [asdict(each) for each in self.lost],
        }

    def spent_on(self, periods: Iterable[Spell], within: Sequence[Spell], repeated_s: float) -> Goodput:
        """Return the goodput of a run, which ``periods`` tile; of several Spells ``within``, the largest counts."""
        spells = [
            part for each in periods for part in (_divided(each, within) if each.cause == TRAINING else [each])
        ]
        seconds: dict[str, float] = defaultdict(float)
        for each in spells:
            seconds[each.cause] += each.seconds
        _repeat(seconds, repeated_s)
        lost = (
            _Loss(each.cause, each.rank, each.node, each.who, each.seconds)
            for each in spells
            if each.rank is not None or each.who
        )
        return replace(self, seconds=_in_order(seconds), lost=_together(lost))

    @classmethod
    def of_job(cls, runs: Iterable[Goodput]) -> Goodput:
        """Return the goodput of a job; a run may make steps again. ``ValueError`` if two runs overlap."""
        in_order = sorted(runs, key=lambda run: run.begin_ns)
        seconds: dict[str, float] = defaultdict(float)
        newest, is_known, end_ns = 0, True, in_order[0].begin_ns
        for run in in_order:
            if run.begin_ns < end_ns:
                raise ValueError("two of the runs overlap: name runs of one job, which follow each other")
            seconds[IDLE] += (run.begin_ns - end_ns) / _NS_PER_S
            own, last = defaultdict(float, run.seconds), run.last_step or 0
            again = 0 if run.first_step is None else max(0, min(newest, last) - run.first_step + 1)
            _repeat(own, again * (run.step_s or 0.0))
            is_known &= run.is_known and (again == 0 or run.step_s is not None)
            newest, end_ns = max(newest, last), run.end_ns
            for cause, spent_s in own.items():
                seconds[cause] += spent_s
        lost = _together(each for run in in_order for each in run.lost)
        return cls(in_order[0].begin_ns, end_ns, _in_order(seconds), lost, is_known)


def _divided(training: Spell, within: Sequence[Spell]) -> Iterator[Spell]:
    """Divide a period of training where what took a share of it begins and ends."""
    inner = [each for each in within if each.begin_ns < training.end_ns and each.end_ns > training.begin_ns]
    edges = {training.begin_ns, training.end_ns, *(ns for each in inner for ns in (each.begin_ns, each.end_ns))}
    inside = (ns for ns in sorted(edges) if training.begin_ns <= ns <= training.end_ns)
    for begin_ns, end_ns in pairwise(inside):
        there = (each for each in inner if each.begin_ns <= begin_ns and each.end_ns >= end_ns)
        most = max(there, key=lambda each: each.share, default=None)
        if most is not None:
            yield replace(most, begin_ns=begin_ns, end_ns=end_ns)
        yield Spell(TRAINING, begin_ns, end_ns, 1.0 if most is None else 1.0 - most.share)


def _repeat(seconds: dict[str, float], repeated_s: float) -> None:
    """Take the time of repeated steps out of the training, which it is in."""
    repeated_s = min(repeated_s, seconds[TRAINING])
    seconds[TRAINING] -= repeated_s
    seconds[REPEATED] += repeated_s


def _in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the causes that took time, in the order of :data:`CAUSES`, and then incidents, the longest first."""
    incidents = sorted(seconds.keys() - CAUSES, key=lambda cause: (-seconds[cause], cause))
    return {cause: seconds[cause] for cause in (*CAUSES, *incidents) if seconds.get(cause, 0.0) > 0}


def _together(lost: Iterable[_Loss]) -> tuple[_Loss, ...]:
    """Add up what was lost to the same cause because of the same rank or node."""
    sums: dict[_Loss, float] = defaultdict(float)
    for each in lost:
        sums[replace(each, seconds=0.0)] += each.seconds
    found = (replace(each, seconds=spent_s) for each, spent_s in sums.items())
    return tuple(sorted(found, key=lambda each: -each.seconds))
