"""The plan of a rehearsal: its faults, drawn from a seed and from what a run without faults has shown."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from checkpointless.faults.spec import FaultKind, FaultPhase, FaultSpec
from checkpointless.observability.telemetry.steps import Recording

LEAST_STEPS = 3  # one before the step of a fault, that step, and one after it
#: Phases that every training announces. Those of a whole step come where Lightning trains.
_OF_UPDATE = (
    FaultPhase.BEFORE_OPTIMIZER,
    FaultPhase.OPTIMIZER,
    FaultPhase.AFTER_OPTIMIZER,
    FaultPhase.BETWEEN,
)
_OF_STEP = (FaultPhase.DATA, FaultPhase.FORWARD, FaultPhase.BACKWARD, *_OF_UPDATE)
_Item = TypeVar("_Item")
_KINDS = (FaultKind.EXCEPTION, FaultKind.SIGKILL)


@dataclass(frozen=True)
class Course:
    """What a run without faults did.

    Attributes:
        first: its first optimizer step; above 1 if the script resumed from a checkpoint.
        last: the last step that is compared.
        ranks: the number of ranks.
        epoch_ends: steps after which an epoch ended.
        validations: steps after which a validation came.
        is_lightning: whether Lightning trained.
    """

    first: int
    last: int
    ranks: int
    epoch_ends: tuple[int, ...] = ()
    validations: tuple[int, ...] = ()
    is_lightning: bool = False

    @property
    def steps(self) -> int:
        """The number of steps that are compared."""
        return self.last - self.first + 1

    @property
    def phases(self) -> Sequence[FaultPhase]:
        """The phases in which faults can be caused."""
        return _OF_STEP if self.is_lightning else _OF_UPDATE


@dataclass(frozen=True)
class Trial:
    """One run with a fault.

    Attributes:
        fault: the spec of the fault.
        after: what comes right before its step ("" if nothing was looked for).
    """

    fault: str
    after: str = ""


def course_of(recording: Recording, steps: int) -> Course:
    """Return what a run without faults did.

    Args:
        recording: what it recorded.
        steps: the largest number of steps that are compared.
    """
    records = [record for each in recording.values() for record in each]
    first = min(record.step for record in records)
    last = min(max(record.step for record in records), first + steps - 1)
    rank = min(recording)
    epochs = {record.step: record.extras.epoch for record in recording[rank] if record.extras.epoch is not None}
    epoch_ends = [step for step in range(first, last) if _changes(epochs, step)]
    validated = {each.step for each in recording.validations.get(rank, ())}
    validated |= {record.step - 1 for record in recording[rank] if record.extras.validated}
    return Course(
        first=first,
        last=last,
        ranks=len(recording),
        epoch_ends=tuple(epoch_ends) if 2 * len(epoch_ends) < last - first else (),  # else each is an epoch
        validations=tuple(sorted(step for step in validated if first <= step < last)),
        is_lightning=any(record.extras.callbacks is not None for record in records),
    )


def _changes(epochs: dict[int, int], step: int) -> bool:
    before, after = epochs.get(step), epochs.get(step + 1)
    return before is not None and after is not None and before != after


def draw(course: Course, count: int, seed: int) -> list[Trial]:
    """Draw the faults of a rehearsal, one for each run.

    The first is an exception and the second a SIGKILL. The third comes in the first step after an epoch's end and
    the fourth in the first step after a validation, if there are such steps; else they are drawn like the others.

    Args:
        course: what a run without faults did.
        count: the number of faults.
        seed: seed of the draws.

    Raises:
        ValueError: the run had too few steps.
    """
    if course.steps < LEAST_STEPS:
        raise ValueError(f"a rehearsal needs at least {LEAST_STEPS} steps, and this run made {course.steps}")
    dice = random.Random(f"checkpointless/{seed}/rehearsal")
    usable = range(course.first + 1, course.last)
    special = {
        2: ("an epoch's end", [step + 1 for step in course.epoch_ends if step + 1 in usable]),
        3: ("a validation", [step + 1 for step in course.validations if step + 1 in usable]),
    }
    ranks, phases = _dealt(dice, range(course.ranks)), _dealt(dice, course.phases)
    trials = []
    for number in range(count):
        after, steps = special.get(number, ("", []))
        kind, rank, phase = _KINDS[number % len(_KINDS)], next(ranks), next(phases)
        step = dice.choice(steps) if steps else _any_step(dice, usable)
        trials.append(Trial(str(FaultSpec(kind, phase, rank, step)), after if steps else ""))
    return trials


def _any_step(dice: random.Random, usable: Sequence[int]) -> int:
    """Return a step, from the later two thirds: what a job has gathered by then is lost if it is not restored."""
    return dice.choice(usable[len(usable) // 3 :])


def _dealt(dice: random.Random, items: Sequence[_Item]) -> Iterator[_Item]:
    """Yield all items in a drawn order, and then all again in another one."""
    while True:
        yield from dice.sample(list(items), len(items))
