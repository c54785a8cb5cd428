"""The judgement of a rehearsal: whether runs agree, and which point of the contract a difference points to."""

from __future__ import annotations

import enum
import random
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpointless.faults.ledger import not_fired
from checkpointless.faults.spec import FaultKind, FaultPhase, FaultSpec, parse
from checkpointless.observability.report.incidents import IncidentSummary, gone_back, summarize
from checkpointless.observability.report.verify import Difference, Quantity, What, compare, differences
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.observability.telemetry.wording import plural
from checkpointless.testing.rehearsal.jobs import Ended

# --- The plan of a rehearsal: its faults, drawn from a seed and from what a run without faults has shown ----------

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


#: The points of docs/contract.md.
POINTS = {
    1: "restored by the front end",
    2: "plain attributes",
    3: "declared state",
    4: "everything else starts over",
    5: "data",
    6: "a function that a process can execute only once",
}
#: What a run computes. Where two runs without faults differ in one of these, a comparison would prove nothing.
_COMPUTED = frozenset(
    {
        Quantity.LOSS,
        Quantity.PARAMS,
        Quantity.BATCH,
        Quantity.BUFFERS,
        Quantity.OPTIMIZER,
        Quantity.LR,
        Quantity.LOSS_SCALE,
    }
)
_OF_HOOKS = (Quantity.CALLBACK, Quantity.MODULE, Quantity.DATA)
_CITED = re.compile(r"docs/contract\.md, (\d)")
_MESSAGE = re.compile(r"^(?:WARNING|ERROR) (checkpointless[\w.]*): (.*)$", re.MULTILINE)
_FAULTS_ROOM = "checkpointless.faults"  # whose messages announce the faults
_FROM_FAULTS = ("injected fault", "InjectedFault")


class Outcome(enum.Enum):
    """What came of a run with a fault."""

    EXACT = "exact"
    INEXACT = "inexact"
    NOT_RECOVERED = "not recovered"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Result:
    """What came of one run with a fault.

    Attributes:
        trial: the fault.
        outcome: in a word.
        why: what differs first, why the job ended, or what else is to be said ("" if nothing is).
        points: the points of the contract that this points to, the most likely first.
        said: the messages that name these points.
        took_s: how long the recovery took, in seconds; None if training did not resume.
        rung: the level of the recovery ("" if there was none).
        run_dir: the run directory.
    """

    trial: Trial
    outcome: Outcome
    why: str = ""
    points: tuple[int, ...] = ()
    said: tuple[str, ...] = ()
    took_s: float | None = None
    rung: str = ""
    run_dir: Path | None = None


def cut(recording: Recording, course: Course, is_whole: bool) -> Recording:
    """Return what is compared of a run.

    Args:
        recording: all that it recorded.
        course: which steps are compared.
        is_whole: whether the run ended by itself, so that its checkpoints at the end can be compared.
    """
    return Recording(
        {rank: [each for each in records if each.step <= course.last] for rank, records in recording.items()},
        {
            rank: [each for each in records if each.step <= course.last]
            for rank, records in recording.validations.items()
        },
        recording.checkpoints if is_whole else None,
    )


def unsteady(first: Recording, second: Recording) -> tuple[Difference | None, frozenset[What]]:
    """Compare two runs without faults.

    Returns:
        The first difference in what they computed (None: there is none), and what else differs between them, such
        as a time that a callback keeps. That cannot be compared with other runs.
    """
    found = list(differences(first, second))
    computed = [each for each in found if each.quantity in _COMPUTED]
    earliest = min(computed, key=lambda each: each.step, default=None)
    return earliest, frozenset(each.what for each in found if each.quantity not in _COMPUTED)


def judge(trial: Trial, ended: Ended, calm: Recording, course: Course, without: Set[What], whole: bool) -> Result:
    """Judge a run with a fault.

    Args:
        trial: the fault.
        ended: how the job ended.
        calm: what is compared of a run without faults.
        course: what that run did.
        without: what is not compared.
        whole: whether the run without faults ended by itself.
    """
    run_dir = ended.run_dir
    events = read_events(run_dir)
    incidents = summarize(events)
    last = incidents[-1] if incidents else None
    took_s = last.headline_s if last is not None else None
    rung = last.rung.label if last is not None and took_s is not None else ""
    if not_fired([parse(trial.fault)], run_dir):
        return Result(trial, Outcome.NOT_TRIED, "the run never reached that point", run_dir=run_dir)
    messages = messages_of([run_dir])
    if not ended.is_good:
        why = why_ended(ended, incidents)
        points = _cited([why, *messages]) or ((6,) if _fails_at_reentry(incidents) else ())
        return Result(trial, Outcome.NOT_RECOVERED, why, points, _citing(points, messages), run_dir=run_dir)
    run = cut(read_steps(run_dir), course, whole and ended.code is not None)
    verdict = compare(calm, run, without, gone_back=(frozenset(), gone_back(events)))
    if verdict.equal:
        steps = len({place.step for place in verdict.made_again})
        again = f"went back, and made {plural(steps, 'step')} again" if steps else ""
        return Result(trial, Outcome.EXACT, again, took_s=took_s, rung=rung, run_dir=run_dir)
    found = [each for each in differences(calm, run) if each.what not in without]
    points = blamed(found, messages, course.is_lightning)
    why = verdict.sentence.removeprefix("not equal: ").partition("; not compared")[0]
    return Result(trial, Outcome.INEXACT, why, points, _citing(points, messages), took_s, rung, run_dir)


def blamed(found: Sequence[Difference], messages: Iterable[str], is_lightning: bool) -> tuple[int, ...]:
    """Return the points of the contract that differences point to, the most likely first.

    Args:
        found: all differences.
        messages: what the engine said in the run.
        is_lightning: whether Lightning trained.
    """
    step = min((each.step for each in found), default=0)
    earliest = [each for each in found if each.step == step]
    points = []
    if any(each.quantity is Quantity.BATCH for each in earliest):
        points.append(5)
    of_state = [1 for each in earliest if each.quantity in _OF_HOOKS]
    for each in earliest:
        if each.quantity is Quantity.OWN and not is_random(each.name):
            of_state.append(3 if each.name.startswith("state.") else 2)
    if of_state and not points and any(each.quantity is Quantity.LOSS for each in earliest):
        points += _cited(messages) or [4]  # state at the end of a step may follow from the step's loss
    points += of_state
    if not points:
        points += _cited(messages)
    if not points and any(each.quantity is Quantity.OWN and is_random(each.name) for each in earliest):
        points.append(5)
    if not points:
        points += [2, 4, 5] if is_lightning else [3, 4, 5]
    return tuple(dict.fromkeys(points))


def _cited(messages: Iterable[str]) -> tuple[int, ...]:
    """Return the points of the contract that messages name."""
    return tuple(dict.fromkeys(int(each) for text in messages for each in _CITED.findall(text)))


def messages_of(run_dirs: Iterable[Path]) -> list[str]:
    """Return the warnings and errors of the engine in the logs of runs, each once, without those about faults."""
    found: dict[str, str] = {}
    for run_dir in run_dirs:
        for log in sorted((run_dir / "logs").glob("rank-*.log")):
            for room, text in _MESSAGE.findall(log.read_text(errors="replace")):
                if not room.startswith(_FAULTS_ROOM) and not any(each in text for each in _FROM_FAULTS):
                    found.setdefault(re.sub(r"\d+", "#", text), text)
    return list(found.values())


def why_ended(ended: Ended, incidents: Sequence[IncidentSummary]) -> str:
    """Return why a job ended, in one line."""
    if not ended.in_time:
        return f"it did not end in time, at step {ended.newest}"
    reason = next((each.reason for each in reversed(incidents) if each.reason), "")
    return reason or (ended.lines[-1] if ended.lines else f"it ended with exit status {ended.code}")


def _fails_at_reentry(incidents: Sequence[IncidentSummary]) -> bool:
    """Return whether no step was made after the fault, because of an error of the script's own."""
    later = [each.cause for each in incidents if each.generation > 0]
    has_resumed = any(each.headline_s is not None for each in incidents)
    return not has_resumed and any(not any(word in cause for word in _FROM_FAULTS) for cause in later)


def _citing(points: Sequence[int], messages: Iterable[str]) -> tuple[str, ...]:
    return tuple(text for text in messages if set(_cited([text])) & set(points))


def is_random(name: str) -> bool:
    """Return whether a part of the rank-local state is a random stream."""
    return name.startswith("random stream ")
