"""Verify: whether two runs computed the same, step by step and rank by rank."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checkpointless.telemetry.steps import StepRecord

#: The steps of a run: by rank, in the order in which they were recorded.
Steps = Mapping[int, Sequence[StepRecord]]


class Run(enum.Enum):
    """Which of the two runs."""

    A = "A"
    B = "B"


class Quantity(enum.Enum):
    """What is compared of each step."""

    LOSS = "loss"
    PARAMS = "params"


@dataclass(frozen=True)
class StepPlace:
    """A step of one rank of one run."""

    run: Run
    rank: int
    step: int


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        step: the optimizer step.
        rank: the rank.
        quantity: the loss or the parameters' digest.
        a: its value in run A, as recorded.
        b: its value in run B, as recorded.
        by: distance of the two losses; None for digests and where a loss is not finite.
    """

    step: int
    rank: int
    quantity: Quantity
    a: str
    b: str
    by: float | None


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        equal: every step of every rank is in both runs once and is the same in both, bit by bit.
        difference: the first one, by step and then by rank.
        steps: number of different steps that were compared.
        ranks: the ranks that were compared.
        repeated: steps that a run recorded more than once.
        missing: steps that a run did not record although it, or the other run, should have them.
    """

    equal: bool
    difference: Difference | None
    steps: int
    ranks: tuple[int, ...]
    repeated: tuple[StepPlace, ...]
    missing: tuple[StepPlace, ...]

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.equal:
            return f"equal: {self.steps} steps on {len(self.ranks)} ranks, bit by bit"
        reasons = []
        if self.difference is not None:
            where = self.difference
            by = "" if where.by is None else f", by {where.by:.3g}"
            reasons.append(f"{where.quantity.value} of step {where.step} on rank {where.rank} differs{by}")
        reasons += [f"{what} steps: {_places(places)}" for what, places in self._irregular() if places]
        return "not equal: " + ("; ".join(reasons) or "no step is in both runs")

    def _irregular(self) -> tuple[tuple[str, tuple[StepPlace, ...]], ...]:
        return ("repeated", self.repeated), ("missing", self.missing)


def compare(a: Steps, b: Steps) -> Verdict:
    """Compare two runs.

    Every rank that is in either run should have every step from the first to the last that is in either. Of a step
    that was recorded more than once the last record is compared.

    Args:
        a: the steps of the one run, as :func:`~checkpointless.telemetry.steps.read_steps` gives them.
        b: the steps of the other.
    """
    ranks = sorted({*a, *b})
    recorded = [record.step for run in (a, b) for records in run.values() for record in records]
    expected = range(min(recorded), max(recorded) + 1) if recorded else range(0)
    last = {
        run: {(rank, record.step): record for rank, records in steps.items() for record in records}
        for run, steps in ((Run.A, a), (Run.B, b))
    }
    missing = tuple(
        StepPlace(run, rank, step)
        for run in Run
        for rank in ranks
        for step in expected
        if (rank, step) not in last[run]
    )
    repeated = tuple(place for run, steps in ((Run.A, a), (Run.B, b)) for place in _repeated(run, steps))
    shared = sorted(last[Run.A].keys() & last[Run.B].keys(), key=lambda key: (key[1], key[0]))
    difference = next(
        (
            found
            for rank, step in shared
            if (found := _difference(rank, last[Run.A][rank, step], last[Run.B][rank, step])) is not None
        ),
        None,
    )
    return Verdict(
        equal=bool(shared) and difference is None and not missing and not repeated,
        difference=difference,
        steps=len({step for _, step in shared}),
        ranks=tuple(sorted({rank for rank, _ in shared})),
        repeated=repeated,
        missing=missing,
    )


def _repeated(run: Run, steps: Steps) -> Iterable[StepPlace]:
    for rank, records in sorted(steps.items()):
        times = Counter(record.step for record in records)
        yield from (StepPlace(run, rank, step) for step in sorted(times) if times[step] > 1)


def _difference(rank: int, a: StepRecord, b: StepRecord) -> Difference | None:
    if a.loss != b.loss:
        return Difference(a.step, rank, Quantity.LOSS, a.loss, b.loss, _distance(a.loss, b.loss))
    if a.params != b.params:
        return Difference(a.step, rank, Quantity.PARAMS, a.params, b.params, None)
    return None


def _distance(a: str, b: str) -> float | None:
    try:
        distance = abs(float.fromhex(a) - float.fromhex(b))
    except (ValueError, OverflowError):
        return None
    return distance if math.isfinite(distance) else None


def _places(places: Sequence[StepPlace], shown: int = 3) -> str:
    text = ", ".join(f"{place.step} on rank {place.rank} of run {place.run.value}" for place in places[:shown])
    return text + (f" and {len(places) - shown} more" if len(places) > shown else "")
