"""Comparison of two runs: whether they computed the same, step by step and rank by rank."""

from __future__ import annotations

import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from checkpointless.observability.telemetry.steps import Recording, StepRecord, ValidationRecord

#: The steps of a run by rank, in the order in which they were recorded. All of a :class:`Recording` is compared.
Steps = Mapping[int, Sequence[StepRecord]]


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
    OWN = "rank-local state"
    CALLBACKS = "state of callback"
    METRIC = "of the validation after"
    CHECKPOINTS = "checkpoints"


_ORDER = {quantity: place for place, quantity in enumerate(Quantity)}
#: What a record of a step has, in fields that are named like these.
_OF_STEPS = [each for each in Quantity if each not in (Quantity.METRIC, Quantity.CHECKPOINTS)]
_NOTHING, _LEFT_OUT = "-", ""  # the latter is the digest of what is no plain data and is not restored after a fault
_OF_CALLBACK = f"{Quantity.CALLBACKS.value} "

#: A quantity, and the name of the callback, attribute or metric ("" if there is none).
What = tuple[Quantity, str]
_Values = Mapping[What, Any]  # Any: a text or a tuple of texts
_Place = tuple[int, int]  # rank and step
_Record = TypeVar("_Record", StepRecord, ValidationRecord)
_Validations = Mapping[_Place, Sequence[ValidationRecord]]


class _StepPlace(NamedTuple):
    """A step of one rank of one run, ``A`` or ``B``."""

    run: str
    rank: int
    step: int


@dataclass(frozen=True)
class Difference:
    """A difference between two runs."""

    step: int  # for a validation, the step that it came after; for checkpoints, the last step
    rank: int
    quantity: Quantity
    a: str
    b: str
    by: float | None  # distance of two losses or metrics; None for other quantities, or if a value is not finite
    name: str = ""

    @property
    def what(self) -> What:
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
    """Result of a comparison."""

    # whether every step of every rank is in both runs once and every validation at least once, and what both runs
    # recorded is identical, bit by bit
    equal: bool
    difference: Difference | None  # first difference, ordered by step and then by rank; None if there is none
    steps: int
    ranks: tuple[int, ...]
    repeated: tuple[_StepPlace, ...]  # steps that a run recorded more than once, although no rank had lost them
    missing: tuple[_StepPlace, ...]  # steps that a run did not record although it or the other run should have them
    # steps after which a run recorded validations with different results
    repeated_validations: tuple[_StepPlace, ...] = ()
    missing_validations: tuple[_StepPlace, ...] = ()  # steps after which only the other run recorded a validation
    # validations that a run recorded more than once with the same results. If a fault comes when one rank has
    # finished a validation and another is still in it, all ranks validate again, from the same state
    again: tuple[_StepPlace, ...] = ()
    # steps that a run recorded more than once because it went back to a copy or to storage; every record of them is
    # compared
    made_again: tuple[_StepPlace, ...] = ()
    not_compared: tuple[str, ...] = ()  # what only one of the runs ever recorded, and which run that was

    @property
    def sentence(self) -> str:
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

    def _irregular(self) -> tuple[tuple[str, tuple[_StepPlace, ...]], ...]:
        return (
            ("repeated steps", self.repeated),
            ("missing steps", self.missing),
            ("repeated validations of different results after steps", self.repeated_validations),
            ("missing validations after steps", self.missing_validations),
        )


def differences(a: Steps, b: Steps) -> Iterator[Difference]:
    """Yield everything that differs between two runs where both recorded it: steps, validations, checkpoints."""
    common = _recorded(a) & _recorded(b)
    steps = [{place: _values(records[-1]) for place, records in _by_place(run).items()} for run in (a, b)]
    yield from _all_different(steps[0], steps[1], common)
    last = [{place: _values(each[-1]) for place, each in (_validations(run) or {}).items()} for run in (a, b)]
    yield from _all_different(last[0], last[1], common)
    kept = [_checkpoints(run) for run in (a, b)]
    if kept[0] is None or kept[1] is None:
        return
    end = max((step for each in steps for _, step in each), default=0)
    for folders in itertools.zip_longest(kept[0], kept[1], fillvalue=()):
        for name in sorted({*folders[0]} ^ {*folders[1]}):
            there = [name if name in folder else _NOTHING for folder in folders]
            yield Difference(end, 0, Quantity.CHECKPOINTS, there[0], there[1], None, name)


def compare(
    a: Steps,
    b: Steps,
    without: Set[What] = frozenset(),
    *,
    gone_back: tuple[Collection[int], Collection[int]] = (frozenset(), frozenset()),
) -> Verdict:
    """Compare two runs, in what both recorded but ``without``; every rank should have every step of a fit, once.

    Of a step that was recorded again, the last record counts, and every one if the run had ``gone_back`` there.
    """
    made = {"A": _by_place(a), "B": _by_place(b)}
    due = {(rank, step) for rank in {*a, *b} for step in _expected([*a.values(), *b.values()])}
    twice = [
        _StepPlace(run, *place) for run, found in made.items() for place in sorted(found) if len(found[place]) > 1
    ]
    made_again = tuple(place for place in twice if place.step in gone_back[place.run == "B"])
    common, of_run = _recorded(a) & _recorded(b), _of_each_run(a, b)
    again = (
        _different(place.rank, place.step, _values(first), _values(later), common)
        for place in made_again
        for first, *others in [made[place.run][place.rank, place.step]]
        for later in others
    )
    found = (each for each in itertools.chain(differences(a, b), *again) if each.what not in without | of_run)
    difference = min(found, key=lambda each: each.step, default=None)
    shared = made["A"].keys() & made["B"].keys()
    verdict = Verdict(
        equal=False,
        difference=difference,
        steps=len({step for _, step in shared}),
        ranks=tuple(sorted({rank for rank, _ in shared})),
        repeated=tuple(place for place in twice if place not in made_again),
        missing=tuple(_StepPlace(run, *place) for run in "AB" for place in sorted(due - made[run].keys())),
        made_again=made_again,
        not_compared=(
            *sorted(
                f"{name} (from the first step on)"
                for _, name in of_run - without
                if not name.startswith("random stream")
            ),
            *_one_sided(a, b),
        ),
        **_irregular_validations(_validations(a), _validations(b)),
    )
    is_regular = not any(places for _, places in verdict._irregular())
    return replace(verdict, equal=bool(shared) and difference is None and is_regular)


def _expected(runs: Iterable[Sequence[StepRecord]]) -> set[int]:
    """Return the steps that every rank should have: from the first to the last of each fit."""
    by_fit: dict[int, list[int]] = defaultdict(list)
    for record in itertools.chain(*runs):
        by_fit[record.fit].append(record.step)
    return {step for steps in by_fit.values() for step in range(min(steps), max(steps) + 1)}


def _by_place(records: Mapping[int, Sequence[_Record]]) -> dict[_Place, list[_Record]]:
    found: dict[_Place, list[_Record]] = defaultdict(list)
    for rank, of_rank in records.items():
        for record in of_rank:
            found[rank, record.step].append(record)
    return found


def _values(record: StepRecord | ValidationRecord) -> _Values:
    if isinstance(record, ValidationRecord):
        callbacks = {f"{_OF_CALLBACK}{key}": record.callbacks[key] for key in sorted(record.callbacks)}
        return {(Quantity.METRIC, name): value for name, value in {**record.metrics, **callbacks}.items()}
    values: dict[What, Any] = {}
    for quantity in _OF_STEPS:
        found = getattr(record, quantity.name.lower())
        named = found if isinstance(found, Mapping) else {"": found}
        values |= {(quantity, name): value for name, value in named.items() if value is not None}
    return values


def _recorded(run: Steps) -> set[What]:
    return {what for records in run.values() for record in records for what in _values(record)}


def _all_different(
    a: Mapping[_Place, _Values], b: Mapping[_Place, _Values], common: Set[What]
) -> Iterator[Difference]:
    for rank, step in sorted(a.keys() & b.keys(), key=lambda place: (place[1], place[0])):
        yield from _different(rank, step, a[rank, step], b[rank, step], common)


def _different(rank: int, step: int, a: _Values, b: _Values, common: Set[What]) -> Iterator[Difference]:
    """Yield the differences of what both runs recorded of a step, or of a validation."""
    for what in sorted({**a, **b}, key=lambda each: _ORDER[each[0]]):
        one, other = a.get(what), b.get(what)
        quantity, name = what
        is_metric = quantity is Quantity.METRIC
        of = (Quantity.CALLBACKS, name.removeprefix(_OF_CALLBACK)) if name.startswith(_OF_CALLBACK) else None
        is_common = what in common or (is_metric and (of is None or of in common))
        is_known = quantity is not Quantity.BATCH or None not in (one, other)  # not if recorded after a fault
        if one != other and is_common and is_known and _LEFT_OUT not in (one, other):
            shown = [_shown(one), _shown(other)]
            by = _distance(*shown) if is_metric or quantity is Quantity.LOSS else None
            yield Difference(step, rank, quantity, shown[0], shown[1], by, name)


def _of_each_run(a: Steps, b: Steps) -> Set[What]:
    """Return the rank-local state that differs in the first step of both: unseeded streams, times, paths."""
    made, of_a = [_by_place(run) for run in (a, b)], _recorded(a)
    found: set[What] = set()
    for rank in a.keys() & b.keys():
        first = min((step for of, step in made[0].keys() & made[1].keys() if of == rank), default=None)
        if first is not None:
            one, other = (_values(each[rank, first][-1]) for each in made)
            names = {(Quantity.OWN, each.name) for each in _different(rank, first, one, other, of_a)}
            found |= names & one.keys() & other.keys()
    return found


def _irregular_validations(a: _Validations | None, b: _Validations | None) -> dict[str, tuple[_StepPlace, ...]]:
    """Return which validations were recorded again, with equal or other results, and which are missing."""
    if a is None or b is None:
        return {}
    repeated, again, missing = list[_StepPlace](), list[_StepPlace](), list[_StepPlace]()
    for run, own, other in (("A", a, b), ("B", b, a)):
        for place in sorted(own):
            first, *others = own[place]
            if others:
                (again if all(each == first for each in others) else repeated).append(_StepPlace(run, *place))
        missing += [_StepPlace(run, *place) for place in sorted(other.keys() - own.keys())]
    return {"repeated_validations": tuple(repeated), "again": tuple(again), "missing_validations": tuple(missing)}


def _validations(run: Steps) -> _Validations | None:
    """Return the validations of a run; None if an older version recorded it, which left them out."""
    if not isinstance(run, Recording) or (Quantity.BUFFERS, "") not in _recorded(run):
        return None
    return _by_place(run.validations)


def _checkpoints(run: Steps) -> tuple[tuple[str, ...], ...] | None:
    return run.checkpoints if isinstance(run, Recording) else None


def _one_sided(a: Steps, b: Steps) -> Iterator[str]:
    names = []
    for run in (a, b):
        recorded = sorted(_recorded(run), key=lambda what: (_ORDER[what[0]], what[1]))
        names.append([f"{quantity.value}{name and ' '}{name}" for quantity, name in recorded])
        names[-1] += [] if _validations(run) is None else ["validations"]
        names[-1] += [] if _checkpoints(run) is None else [Quantity.CHECKPOINTS.value]
    yield from (f"{name} (only in run A)" for name in names[0] if name not in names[1])
    yield from (f"{name} (only in run B)" for name in names[1] if name not in names[0])


def _shown(value: Any) -> str:
    shown = " ".join(value) if isinstance(value, tuple) else str(value)
    return _NOTHING if value is None else shown


def _distance(a: str, b: str) -> float | None:
    """Return the distance of two numbers as ``float.hex()`` gives them; None for digests and what is not finite."""
    if "0x" not in a or "0x" not in b:
        return None
    distance = abs(float.fromhex(a) - float.fromhex(b))
    return distance if math.isfinite(distance) else None


def _places(places: Sequence[_StepPlace], shown: int = 3) -> str:
    text = ", ".join(f"{place.step} on rank {place.rank} of run {place.run}" for place in places[:shown])
    return text + (f" and {len(places) - shown} more" if len(places) > shown else "")
