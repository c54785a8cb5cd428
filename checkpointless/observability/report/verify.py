"""Comparison of two runs: whether they computed the same, step by step and rank by rank."""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from checkpointless.observability.telemetry.steps import Recording, StepRecord, ValidationRecord

#: The steps of a run by rank, in the order in which they were recorded. All of a :class:`Recording` is compared.
Steps = Mapping[int, Sequence[StepRecord]]


class Run(enum.Enum):
    """One of the two runs that are compared."""

    A = "A"
    B = "B"


class Quantity(enum.Enum):
    """A quantity that is compared."""

    LOSS = "loss"
    PARAMS = "params"
    BATCH = "batch"
    BUFFERS = "buffers"
    OPTIMIZER = "optimizer's state"
    LR = "learning rates"
    LOSS_SCALE = "loss scale"
    MODULE = "state of the module"
    DATA = "state of the data module"
    CALLBACK = "state of callback"
    OWN = "rank-local state"
    METRIC = "of the validation after"
    CHECKPOINTS = "checkpoints"


#: The fields of a step's extras that are compared as they are.
_FIELDS = {
    Quantity.BATCH: "batch",
    Quantity.BUFFERS: "buffers",
    Quantity.OPTIMIZER: "optimizer",
    Quantity.LR: "lr",
    Quantity.LOSS_SCALE: "loss_scale",
    Quantity.MODULE: "module",
    Quantity.DATA: "data",
}
#: The fields that have a value for each name.
_BY_NAME = {Quantity.OWN: "own", Quantity.CALLBACK: "callbacks"}
_NOTHING, _LEFT_OUT = "-", ""  # the latter is the digest of what is no plain data and begins anew after a fault

#: A quantity, and the name of the callback, attribute or metric ("" if there is none).
What = tuple[Quantity, str]


@dataclass(frozen=True)
class StepPlace:
    """A step of one rank of one run."""

    run: Run
    rank: int
    step: int


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    Attributes:
        step: optimizer step; for a validation, the step that it came after; for checkpoints, the last step.
        rank: rank on which the runs differ.
        quantity: quantity that differs.
        a: value in run A, as recorded.
        b: value in run B, as recorded.
        by: distance of two losses or metrics; None for other quantities, or if a value is not finite.
        name: name of the callback, metric, attribute or checkpoint.
    """

    step: int
    rank: int
    quantity: Quantity
    a: str
    b: str
    by: float | None
    name: str = ""

    @property
    def what(self) -> What:
        """What differs, wherever it does."""
        return self.quantity, self.name

    @property
    def place(self) -> str:
        """What differs, with its step and rank."""
        if self.quantity is Quantity.CHECKPOINTS:
            return f"checkpoint {self.name} at the end"
        at = f"step {self.step} on rank {self.rank}"
        if self.quantity is Quantity.METRIC:
            return f"{self.name} {self.quantity.value} {at}"
        return f"{self.quantity.value}{self.name and ' '}{self.name} of {at}"

    @property
    def sentence(self) -> str:
        """What differs, and by how much, in one line."""
        if self.quantity is Quantity.CHECKPOINTS:
            return f"{self.place} is in run {'A' if self.b == _NOTHING else 'B'} only"
        return f"{self.place} differs" + ("" if self.by is None else f", by {self.by:.3g}")


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        equal: whether every step of every rank is in both runs once and every validation at least once, and what
            both runs recorded is identical, bit by bit.
        difference: first difference, ordered by step and then by rank; None if there is none.
        steps: number of distinct steps that were compared.
        ranks: ranks that were compared.
        repeated: steps that a run recorded more than once, although no rank had lost them.
        missing: steps that a run did not record although it or the other run should have them.
        repeated_validations: steps after which a run recorded validations with different results.
        missing_validations: steps after which only the other run recorded a validation.
        again: validations that a run recorded more than once with the same results. If a fault comes when one rank
            has finished a validation and another is still in it, all ranks validate again, from the same state.
        made_again: steps that a run recorded more than once because it went back to a copy or to storage; every
            record of them is compared.
        not_compared: what only one of the runs ever recorded, and which run that was.
    """

    equal: bool
    difference: Difference | None
    steps: int
    ranks: tuple[int, ...]
    repeated: tuple[StepPlace, ...]
    missing: tuple[StepPlace, ...]
    repeated_validations: tuple[StepPlace, ...] = ()
    missing_validations: tuple[StepPlace, ...] = ()
    again: tuple[StepPlace, ...] = ()
    made_again: tuple[StepPlace, ...] = ()
    not_compared: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        left_out = (
            f"; validated again, with the same results, after steps: {_places(self.again)}" if self.again else ""
        )
        if self.made_again:
            left_out += f"; gone back, and made again: steps {_places(self.made_again)}"
        left_out += f"; not compared: {', '.join(self.not_compared)}" if self.not_compared else ""
        if self.equal:
            return f"equal: {self.steps} steps on {len(self.ranks)} ranks, bit by bit{left_out}"
        reasons = [] if self.difference is None else [self.difference.sentence]
        reasons += [f"{what}: {_places(places)}" for what, places in self._irregular() if places]
        return "not equal: " + ("; ".join(reasons) or "no step is in both runs") + left_out

    def _irregular(self) -> tuple[tuple[str, tuple[StepPlace, ...]], ...]:
        return (
            ("repeated steps", self.repeated),
            ("missing steps", self.missing),
            ("repeated validations of different results after steps", self.repeated_validations),
            ("missing validations after steps", self.missing_validations),
        )


def _expected(records: Iterable[StepRecord]) -> list[int]:
    """Return the steps that every rank should have: from the first to the last of each fit."""
    by_fit: dict[int, list[int]] = {}
    for record in records:
        by_fit.setdefault(record.fit, []).append(record.step)
    return sorted({step for steps in by_fit.values() for step in range(min(steps), max(steps) + 1)})


def differences(a: Steps, b: Steps) -> Iterator[Difference]:
    """Yield everything that differs between two runs where both recorded it: steps, validations, checkpoints."""
    last = [{(rank, each.step): each for rank, records in run.items() for each in records} for run in (a, b)]
    common = _Common.of(a, b)
    for rank, step in sorted(last[0].keys() & last[1].keys(), key=lambda key: (key[1], key[0])):
        yield from common.differences(rank, last[0][rank, step], last[1][rank, step])
    yield from _Validations.of(a, b).differences()
    yield from _checkpoint_differences(a, b, max((step for run in last for _, step in run), default=0))


def compare(
    a: Steps,
    b: Steps,
    without: Set[What] = frozenset(),
    *,
    gone_back: tuple[Collection[int], Collection[int]] = (frozenset(), frozenset()),
) -> Verdict:
    """Compare two runs.

    Every rank of either run should have every step from the first to the last step of each fit of either run, once.
    If a step was recorded more than once, its last record is compared; if the run had to go back, because no rank
    held the newest state, every record is. What one of the runs never recorded (an older recording, or a callback
    that only the other run has) is not compared, and the verdict says so.

    Args:
        a: steps of run A, as :func:`~checkpointless.observability.telemetry.steps.read_steps` returns them.
        b: steps of run B, as :func:`~checkpointless.observability.telemetry.steps.read_steps` returns them.
        without: what is not compared.
        gone_back: for each run, the committed steps that no rank held any more, so that they were made again.
    """
    expected = _expected(record for run in (a, b) for records in run.values() for record in records)
    last = {
        run: {(rank, record.step): record for rank, records in steps.items() for record in records}
        for run, steps in ((Run.A, a), (Run.B, b))
    }
    missing = tuple(
        StepPlace(run, rank, step)
        for run in Run
        for rank in sorted({*a, *b})
        for step in expected
        if (rank, step) not in last[run]
    )
    twice = [place for run, steps in ((Run.A, a), (Run.B, b)) for place in _repeated(run, steps)]
    made_again = tuple(place for place in twice if place.step in gone_back[place.run is Run.B])
    repeated = tuple(place for place in twice if place not in made_again)
    shared = last[Run.A].keys() & last[Run.B].keys()
    common, validations = _Common.of(a, b), _Validations.of(a, b)
    all_found = itertools.chain(differences(a, b), common.differences_made_again(made_again, {Run.A: a, Run.B: b}))
    of_run = _of_each_run(a, b) - without
    own = sorted(f"{name} (from the first step on)" for _, name in of_run if not name.startswith("random stream"))
    found = (each for each in all_found if each.what not in without | of_run)
    difference = min(found, key=lambda each: each.step, default=None)
    not_compared = (*own, *common.not_compared, *validations.not_compared, *_checkpoints_not_compared(a, b))
    irregular = (repeated, missing, validations.repeated, validations.missing)
    return Verdict(
        equal=bool(shared) and difference is None and not any(irregular),
        difference=difference,
        steps=len({step for _, step in shared}),
        ranks=tuple(sorted({rank for rank, _ in shared})),
        repeated=repeated,
        missing=missing,
        repeated_validations=validations.repeated,
        missing_validations=validations.missing,
        again=validations.again,
        made_again=made_again,
        not_compared=not_compared,
    )


def _repeated(run: Run, steps: Mapping[int, Sequence[StepRecord]]) -> Iterator[StepPlace]:
    for rank, records in sorted(steps.items()):
        times = Counter(record.step for record in records)
        yield from (StepPlace(run, rank, step) for step in sorted(times) if times[step] > 1)


def _validated_again(
    run: Run, validations: Mapping[int, Sequence[ValidationRecord]], *, alike: bool
) -> Iterator[StepPlace]:
    """Yield the validations recorded more than once: with equal results if ``alike``, else with different ones."""
    for rank, records in sorted(validations.items()):
        by_step: dict[int, list[ValidationRecord]] = {}
        for record in records:
            by_step.setdefault(record.step, []).append(record)
        for step, found in sorted(by_step.items()):
            if len(found) > 1 and alike == all(each == found[0] for each in found):
                yield StepPlace(run, rank, step)


def _of_each_run(a: Steps, b: Steps) -> Set[What]:
    """Return the rank-local state that differs in the first step of both: unseeded streams, times, paths."""
    found: set[What] = set()
    for rank in a.keys() & b.keys():
        own = [{each.step: each.extras.own or {} for each in run[rank]} for run in (a, b)]
        first = min(own[0].keys() & own[1].keys(), default=None)
        one, other = (each[first] if first is not None else {} for each in own)
        both = {name for name in one.keys() & other.keys() if _LEFT_OUT not in (one[name], other[name])}
        found |= {(Quantity.OWN, name) for name in both if one[name] != other[name]}
    return found


@dataclass(frozen=True)
class _Common:
    """What both runs recorded of their steps.

    Attributes:
        quantities: quantities of :data:`_FIELDS` that both runs recorded.
        named: quantities of :data:`_BY_NAME` that both runs recorded, with their names.
        not_compared: what only one of the runs recorded.
    """

    quantities: tuple[Quantity, ...]
    named: tuple[What, ...]
    not_compared: tuple[str, ...]

    @classmethod
    def of(cls, a: Steps, b: Steps) -> _Common:
        quantities = [_recorded(run) for run in (a, b)]
        named = [[(each, name) for each in _BY_NAME for name in sorted(_names(each, run))] for run in (a, b)]
        both = quantities[0] & quantities[1]
        return cls(
            tuple(quantity for quantity in _FIELDS if quantity in both),
            tuple(each for each in named[0] if each in named[1]),
            (
                *_one_sided([each.value for each in _FIELDS if each in run] for run in quantities),
                *_one_sided([f"{each.value} {name}" for each, name in run] for run in named),
            ),
        )

    def differences(self, rank: int, a: StepRecord, b: StepRecord) -> Iterator[Difference]:
        """Yield the differences of one step."""
        if a.loss != b.loss:
            yield Difference(a.step, rank, Quantity.LOSS, a.loss, b.loss, _distance(a.loss, b.loss))
        if a.params != b.params:
            yield Difference(a.step, rank, Quantity.PARAMS, a.params, b.params, None)
        for quantity in self.quantities:
            values = [getattr(each.extras, _FIELDS[quantity]) for each in (a, b)]
            is_known = quantity is not Quantity.BATCH or None not in values  # not if it was recorded after a fault
            if values[0] != values[1] and is_known:
                yield Difference(a.step, rank, quantity, _shown(values[0]), _shown(values[1]), None)
        for quantity, name in self.named:
            values = [(getattr(each.extras, _BY_NAME[quantity]) or {}).get(name) for each in (a, b)]
            if values[0] != values[1] and _LEFT_OUT not in values:
                yield Difference(a.step, rank, quantity, _shown(values[0]), _shown(values[1]), None, name)

    def differences_made_again(
        self, places: Iterable[StepPlace], runs: Mapping[Run, Steps]
    ) -> Iterator[Difference]:
        """Yield the differences between the first and each later record of steps that one run has made again."""
        for place in places:
            first, *later = (each for each in runs[place.run][place.rank] if each.step == place.step)
            for record in later:
                yield from self.differences(place.rank, first, record)


@dataclass(frozen=True)
class _Validations:
    """The last validation after each step of both runs, by rank and step."""

    a: Mapping[tuple[int, int], ValidationRecord]
    b: Mapping[tuple[int, int], ValidationRecord]
    callbacks: tuple[str, ...] = ()
    repeated: tuple[StepPlace, ...] = ()
    again: tuple[StepPlace, ...] = ()
    missing: tuple[StepPlace, ...] = ()
    not_compared: tuple[str, ...] = ()

    @classmethod
    def of(cls, a: Steps, b: Steps) -> _Validations:
        runs = [_validations(run) for run in (a, b)]
        if runs[0] is None or runs[1] is None:
            return cls({}, {}, not_compared=tuple(_one_sided(["validations"] if run else [] for run in runs)))
        last = [
            {(rank, record.step): record for rank, records in run.items() for record in records}
            for run in runs
            if run is not None
        ]
        repeated, again = (
            tuple(
                place for which, run in zip(Run, runs) for place in _validated_again(which, run or {}, alike=alike)
            )
            for alike in (False, True)
        )
        return cls(
            last[0],
            last[1],
            callbacks=tuple(sorted(_names(Quantity.CALLBACK, a) & _names(Quantity.CALLBACK, b))),
            repeated=repeated,
            again=again,
            missing=tuple(
                StepPlace(which, rank, step)
                for which, own, other in zip(Run, last, reversed(last))
                for rank, step in sorted(other.keys() - own.keys())
            ),
        )

    def differences(self) -> Iterator[Difference]:
        """Yield the differences of all validations that are in both runs."""
        for rank, step in sorted(self.a.keys() & self.b.keys(), key=lambda key: (key[1], key[0])):
            a, b = self.a[rank, step], self.b[rank, step]
            for name in sorted({*a.metrics, *b.metrics}):
                of_a, of_b = _shown(a.metrics.get(name)), _shown(b.metrics.get(name))
                if of_a != of_b:
                    yield Difference(step, rank, Quantity.METRIC, of_a, of_b, _distance(of_a, of_b), name)
            for key in self.callbacks:
                of_a, of_b = _shown(a.callbacks.get(key)), _shown(b.callbacks.get(key))
                if of_a != of_b:
                    name = f"{Quantity.CALLBACK.value} {key}"
                    yield Difference(step, rank, Quantity.METRIC, of_a, of_b, None, name)


def _checkpoint_differences(a: Steps, b: Steps, step: int) -> Iterator[Difference]:
    kept = [run.checkpoints for run in (a, b) if isinstance(run, Recording) and run.checkpoints is not None]
    if len(kept) < len(Run):
        return
    for folder_a, folder_b in itertools.zip_longest(*kept, fillvalue=()):
        for name in sorted({*folder_a} ^ {*folder_b}):
            there = [name if name in folder else _NOTHING for folder in (folder_a, folder_b)]
            yield Difference(step, 0, Quantity.CHECKPOINTS, there[0], there[1], None, name)


def _checkpoints_not_compared(a: Steps, b: Steps) -> Iterator[str]:
    kept = (run.checkpoints if isinstance(run, Recording) else None for run in (a, b))
    return _one_sided([] if each is None else [Quantity.CHECKPOINTS.value] for each in kept)


def _recorded(run: Steps) -> set[Quantity]:
    """Return the quantities of :data:`_FIELDS` that a run recorded of any step."""
    records = [record.extras for each in run.values() for record in each]
    return {
        quantity
        for quantity, name in _FIELDS.items()
        if any(getattr(extras, name) is not None for extras in records)
    }


def _names(quantity: Quantity, run: Steps) -> set[str]:
    field = _BY_NAME[quantity]
    return {name for each in run.values() for record in each for name in getattr(record.extras, field) or ()}


def _validations(run: Steps) -> Mapping[int, Sequence[ValidationRecord]] | None:
    """Return the validations of a run; None if an older version recorded it, which left them out."""
    if not isinstance(run, Recording) or Quantity.BUFFERS not in _recorded(run):
        return None
    return run.validations


def _one_sided(names: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the names that are in the list of only one of two runs."""
    a, b = names
    yield from (f"{name} (only in run A)" for name in a if name not in b)
    yield from (f"{name} (only in run B)" for name in b if name not in a)


def _shown(value: Any) -> str:
    shown = " ".join(value) if isinstance(value, tuple) else str(value)
    return _NOTHING if value is None else shown


def _distance(a: str, b: str) -> float | None:
    try:
        distance = abs(float.fromhex(a) - float.fromhex(b))
    except (ValueError, OverflowError):
        return None
    return distance if math.isfinite(distance) else None


def _places(places: Sequence[StepPlace], shown: int = 3) -> str:
    text = ", ".join(f"{place.step} on rank {place.rank} of run {place.run.value}" for place in places[:shown])
    return text + (f" and {len(places) - shown} more" if len(places) > shown else "")
