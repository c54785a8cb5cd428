"""A rehearsal from its first run to its page."""

from __future__ import annotations

import enum
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from checkpointless.faults.spec import FaultKind, FaultPhase, FaultSpec, parse
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.ranks.preload import PlatformError
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.verify import Difference, Quantity, What, compare, differences
from checkpointless.observability.telemetry import wording
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.observability.telemetry.wording import plural
from checkpointless.testing.jobs import Ended, Job, import_once, run_jobs

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
class _Course:
    """What a run without faults did; ``epoch_ends`` and ``validations`` are the steps that these came after."""

    first: int
    last: int
    ranks: int
    epoch_ends: tuple[int, ...] = ()
    validations: tuple[int, ...] = ()
    is_lightning: bool = False

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def phases(self) -> Sequence[FaultPhase]:
        return _OF_STEP if self.is_lightning else _OF_UPDATE


@dataclass(frozen=True)
class _Trial:
    """One run with a fault, right after what ``after`` names ("": nothing was looked for)."""

    fault: str
    after: str = ""


def _course_of(recording: Recording, steps: int) -> _Course:
    """Return what a run without faults did in its first ``steps`` steps."""
    records = [record for each in recording.values() for record in each]
    first = min(record.step for record in records)
    last = min(max(record.step for record in records), first + steps - 1)
    rank = min(recording)
    epochs = {record.step: record.epoch for record in recording[rank] if record.epoch is not None}
    known = [step for step in range(first, last) if {step, step + 1} <= epochs.keys()]
    epoch_ends = [step for step in known if epochs[step] != epochs[step + 1]]
    validated = {each.step for each in recording.validations.get(rank, ())}
    validated |= {record.step - 1 for record in recording[rank] if record.validated}
    return _Course(
        first=first,
        last=last,
        ranks=len(recording),
        epoch_ends=tuple(epoch_ends) if 2 * len(epoch_ends) < last - first else (),  # else each is an epoch
        validations=tuple(sorted(step for step in validated if first <= step < last)),
        is_lightning=any(record.callbacks is not None for record in records),
    )


def _draw(course: _Course, count: int, seed: int) -> list[_Trial]:
    """Draw an exception, a SIGKILL and, if possible, a fault each right after an epoch's end and a validation."""
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
        # Else in the later two thirds: what a job has gathered by then is lost if it is not restored.
        step = dice.choice(steps or usable[len(usable) // 3 :])
        trials.append(_Trial(str(FaultSpec(kind, phase, rank, step)), after if steps else ""))
    return trials


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
_OF_HOOKS = (Quantity.CALLBACKS, Quantity.MODULE, Quantity.DATA)
_CITED = re.compile(r"docs/contract\.md, (\d)")
_MESSAGE = re.compile(r"^(?:WARNING|ERROR) (checkpointless[\w.]*): (.*)$", re.MULTILINE)
_FAULTS_ROOM = "checkpointless.faults"  # whose messages announce the faults
_FROM_FAULTS = ("injected fault", "InjectedFault")


class _Outcome(enum.Enum):
    """What came of a run with a fault."""

    EXACT = "exact"
    INEXACT = "inexact"
    NOT_RECOVERED = "not recovered"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class _Result:
    """What came of one run with a fault, why, and which points of the contract it points to."""

    trial: _Trial
    outcome: _Outcome
    why: str = ""
    points: tuple[int, ...] = ()
    said: tuple[str, ...] = ()
    took_s: float | None = None
    rung: str = ""


def _cut(recording: Recording, course: _Course, is_whole: bool) -> Recording:
    """Return what is compared of a run: its checkpoints at the end only if it ended by itself."""
    return Recording(
        {rank: [each for each in records if each.step <= course.last] for rank, records in recording.items()},
        {
            rank: [each for each in records if each.step <= course.last]
            for rank, records in recording.validations.items()
        },
        recording.checkpoints if is_whole else None,
    )


def _unsteady(first: Recording, second: Recording) -> tuple[Difference | None, frozenset[What]]:
    """Return the first difference in what two runs without faults computed, and what else differs."""
    found = list(differences(first, second))
    computed = [each for each in found if each.quantity in _COMPUTED]
    earliest = min(computed, key=lambda each: each.step, default=None)
    return earliest, frozenset(each.what for each in found if each.quantity not in _COMPUTED)


def _judge(
    trial: _Trial, ended: Ended, calm: Recording, course: _Course, without: Set[What], whole: bool
) -> _Result:
    """Judge a run with a fault; ``whole`` says whether the run without faults ended by itself."""
    run_dir, incidents = ended.run_dir, ended.incidents
    last = incidents[-1] if incidents else None
    took_s = last.headline_s if last is not None else None
    rung = last.rung.label if last is not None and took_s is not None else ""
    if ended.missing:
        return _Result(trial, _Outcome.NOT_TRIED, "the run never reached that point")
    messages = _messages_of([run_dir])
    if not ended.is_good:
        why = _why_ended(ended, incidents)
        points = _cited([why, *messages]) or ((6,) if _fails_at_reentry(incidents) else ())
        return _Result(trial, _Outcome.NOT_RECOVERED, why, points, _citing(points, messages))
    run = _cut(read_steps(run_dir), course, whole and ended.code is not None)
    verdict = ended.compare(calm, run, without)
    if verdict.equal:
        steps = len({place.step for place in verdict.made_again})
        again = f"went back, and made {plural(steps, 'step')} again" if steps else ""
        return _Result(trial, _Outcome.EXACT, again, took_s=took_s, rung=rung)
    found = [each for each in differences(calm, run) if each.what not in without]
    points = _blamed(found, messages, course.is_lightning)
    why = verdict.sentence.removeprefix("not equal: ").partition("; not compared")[0]
    return _Result(trial, _Outcome.INEXACT, why, points, _citing(points, messages), took_s, rung)


def _blamed(found: Sequence[Difference], messages: Sequence[str], is_lightning: bool) -> tuple[int, ...]:
    """Return the points of the contract that differences point to, the most likely first."""
    step = min((each.step for each in found), default=0)
    earliest = [each for each in found if each.step == step]
    what, cited = {each.quantity for each in earliest}, _cited(messages)
    own = [each.name for each in earliest if each.quantity is Quantity.OWN]
    of_state = [1 for each in earliest if each.quantity in _OF_HOOKS]
    of_state += [3 if name.startswith("state.") else 2 for name in own if not _is_random(name)]
    if Quantity.BATCH in what:
        points = [5, *cited, *of_state]  # what a loop keeps for itself may choose the batch
    elif of_state and Quantity.LOSS in what:
        points = [*(cited or [4]), *of_state]  # state at the end of a step may follow from the step's loss
    else:
        points = of_state or [*cited] or ([5] if own else [2 if is_lightning else 3, 4, 5])
    return tuple(dict.fromkeys(points))


def _cited(messages: Iterable[str]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(each) for text in messages for each in _CITED.findall(text)))


def _messages_of(run_dirs: Iterable[Path]) -> list[str]:
    """Return the warnings and errors of the engine in the logs of runs, each once, without those about faults."""
    found: dict[str, str] = {}
    for run_dir in run_dirs:
        for log in sorted((run_dir / "logs").glob("rank-*.log")):
            for room, text in _MESSAGE.findall(log.read_text(errors="replace")):
                if not room.startswith(_FAULTS_ROOM) and not any(each in text for each in _FROM_FAULTS):
                    found.setdefault(re.sub(r"\d+", "#", text), text)
    return list(found.values())


def _why_ended(ended: Ended, incidents: Sequence[IncidentSummary]) -> str:
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


def _is_random(name: str) -> bool:
    return name.startswith("random stream ")


# --- The page at the end of a rehearsal, for people and as data ---------------------------------------------------

EXACT, INEXACT, NOT_REHEARSED = 0, 1, 3
_LONGEST = 500


@dataclass(frozen=True)
class _Page:
    """What a rehearsal found, or the ``problem`` for which it could not be made."""

    name: str
    problem: str = ""
    course: _Course | None = None
    results: tuple[_Result, ...] = ()
    not_compared: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    folder: Path | None = None
    seed: int = 0

    @property
    def worst(self) -> Sequence[_Result]:
        return [each for each in self.results if each.outcome in (_Outcome.INEXACT, _Outcome.NOT_RECOVERED)]

    @property
    def status(self) -> int:
        if self.worst:
            return INEXACT
        return NOT_REHEARSED if self.problem else EXACT

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.worst:
            first = self.worst[0]
            return f"{first.outcome.value}: after {first.trial.fault}: {first.why}{_contract(first)}"
        if self.problem or self.course is None:
            return f"could not be rehearsed: {self.problem}"
        tried = sum(each.outcome is _Outcome.EXACT for each in self.results)
        on = wording.plural(self.course.ranks, "rank")
        steps = wording.plural(self.course.steps, "step")
        return f"exact: {steps} on {on}, bit by bit, in {wording.plural(tried, 'run')} with a fault each"

    def show(self, console: Console) -> None:
        """Print the page; long lines are left to the terminal, so that the last line is the verdict."""

        def say(text: str) -> None:
            console.print(wording.printable(text, _LONGEST), soft_wrap=True)

        course = self.course
        if course is not None:
            on, steps = wording.plural(course.ranks, "rank"), f"steps {course.first} to {course.last}"
            say(f"rehearsal of {self.name}: {on}, {steps}, two runs without faults")
            for note in _notes(course, self.not_compared):
                say(f"- {note}")
        if self.results:
            console.print(_table(self.results))
            say(f"tried: {_tried(self.results)}")
        for each in self.worst:
            say(f"{each.trial.fault}: {each.why}{_contract(each)}")
            for text in each.said:
                say(f"- said in that run: {text}")
        for text in self.warnings:
            say(f"- warning: {text}")
        if self.folder is not None:
            say(
                f"the runs are in {self.folder} (checkpointless report, verify); the same again: --seed {self.seed}"
            )
        say(self.sentence)

    def as_json(self) -> str:
        course = self.course
        return json.dumps(
            {
                "name": self.name,
                "verdict": {EXACT: "exact", INEXACT: "inexact", NOT_REHEARSED: "not rehearsed"}[self.status],
                "sentence": self.sentence,
                "problem": self.problem,
                "first_step": course and course.first,
                "last_step": course and course.last,
                "ranks": course and course.ranks,
                "faults": [
                    {
                        "fault": each.trial.fault,
                        "after": each.trial.after,
                        "outcome": each.outcome.value,
                        "why": each.why,
                        "contract": list(each.points),
                        "said": list(each.said),
                        "recovered_s": each.took_s,
                        "rung": each.rung,
                    }
                    for each in self.results
                ],
                "not_compared": list(self.not_compared),
                "warnings": list(self.warnings),
                "seed": self.seed,
                "folder": self.folder and str(self.folder),
            },
            indent=1,
        )


def _contract(result: _Result) -> str:
    if not result.points:
        return ""
    named = " or ".join(f"{each} ({POINTS[each]})" for each in result.points)
    sure = "points to" if len(result.points) == 1 or result.said else "may be"
    return f"; this {sure} docs/contract.md, {named}"


def _notes(course: _Course, not_compared: Sequence[str]) -> Iterator[str]:
    if course.first > 1:
        yield f"the script resumed from a checkpoint after step {course.first - 1}"
    for reached, what in (course.epoch_ends, "epoch's end"), (course.validations, "validation"):
        if not reached:
            yield f"no {what} was seen in these steps, so no fault came right after one: try more with --steps"
    if not_compared:
        yield f"not compared, because two runs without faults differ there: {', '.join(not_compared)}"


def _tried(results: Sequence[_Result]) -> str:
    """Name the ranks, steps and phases in which faults came."""
    specs = [parse(each.trial.fault) for each in results if each.outcome is not _Outcome.NOT_TRIED]
    ranks = wording.numbered("rank", {spec.rank for spec in specs if spec.rank is not None})
    steps = wording.numbered("step", {spec.step for spec in specs if spec.step is not None})
    return f"{ranks}; {steps}; phases {', '.join(sorted({spec.phase.value for spec in specs}))}"


def _table(results: Sequence[_Result]) -> Table:
    table = Table(
        "fault", "right after", "recovered", "result", title="one fault in each run", title_justify="left"
    )
    for each in results:
        took = "" if each.took_s is None or not each.rung else f"{each.rung}, {wording.duration(each.took_s)}"
        more = f" ({each.why})" if each.outcome in (_Outcome.EXACT, _Outcome.NOT_TRIED) and each.why else ""
        table.add_row(each.trial.fault, each.trial.after, took, f"{each.outcome.value}{more}")
    return table


_CALM = ("calm-1", "calm-2")
_RECORDS_NOTHING = (
    "no step was recorded: the training has to be Lightning's, NeMo's or Megatron-Bridge's, or a loop of one's own "
    "with PlainTraining or MegatronTraining"
)


@dataclass(frozen=True)
class Rehearsal:
    """What is to be rehearsed."""

    name: str  # name of the script, module or recipe
    config: LaunchConfig  # the configuration of its jobs; run directory and faults are each job's own
    steps: int  # the largest number of steps that are compared
    limit_s: float  # how many seconds a job may take
    folder: Path  # where run directories and working directories are made
    in_place: bool  # whether jobs run in this process's working directory
    faults: int  # the number of faults
    seed: int  # seed of the draws
    at_once: int  # the largest number of jobs that run at a time
    # whether this process imports what the jobs need, and forks them. A process that uses CUDA must not
    imports: bool = True

    def job(self, name: str, fault: str = "") -> Job:
        config = replace(self.config, run_dir=self.folder / name, faults=(fault,) if fault else ())
        folder = None if self.in_place else self.folder / "folders" / name
        return Job(name, (config,), self.limit_s, self.steps, folder)

    def run(self, say: Callable[[str], None]) -> _Page:
        rehearsal, name, folder, seed = self, self.name, self.folder, self.seed
        if self.imports:
            say("importing what the ranks need, once for all jobs")
            try:
                rehearsal = replace(self, config=import_once(self.config, folder / "imports.txt"))
            except PlatformError as error:
                return _Page(name, str(error), None, folder=folder, seed=seed)
        calm = run_jobs([rehearsal.job(each) for each in _CALM], rehearsal.at_once, say)
        course: _Course | None = None
        try:
            recordings = [_read(each) for each in calm]
            course = _course_of(recordings[0], rehearsal.steps)
            _require_begin(recordings[1], course.first)
            whole = all(each.code is not None for each in calm)
            reference, other = (_cut(each, course, whole) for each in recordings)
            without = _require_steady(reference, other)
            trials = _draw(course, rehearsal.faults, seed)
        except (_NotRehearsed, ValueError) as error:
            warnings = tuple(_messages_of([each.run_dir for each in calm]))
            return _Page(name, str(error), course, warnings=warnings, folder=folder, seed=seed)
        jobs = [rehearsal.job(f"fault-{number}", trial.fault) for number, trial in enumerate(trials, 1)]
        ended = run_jobs(jobs, rehearsal.at_once, say)
        results: list[_Result] = []
        try:
            for each in ended:
                _require_begin(_read(each, may_fail=True), course.first)
            pairs = zip(trials, ended, strict=True)
            results += [_judge(trial, each, reference, course, without, whole) for trial, each in pairs]
            is_tried = any(each.outcome is not _Outcome.NOT_TRIED for each in results)
            problem = "" if is_tried else "none of the faults came: the runs never reached those points"
        except _NotRehearsed as error:
            problem = str(error)
        return _Page(
            name,
            problem,
            course,
            tuple(results),
            tuple(sorted(f"{each.value}{name and ' '}{name}" for each, name in without if not _is_random(name))),
            tuple(_messages_of(each.run_dir for each in (*calm, *ended))),
            folder,
            seed,
        )


class _NotRehearsed(Exception):
    """Raised if a job cannot be rehearsed; the message says why and what to do."""


def _read(ended: Ended, may_fail: bool = False) -> Recording:
    """Return what a run recorded; :class:`_NotRehearsed` if it failed, or recorded nothing, and may not."""
    if not ended.is_good and not may_fail:
        why = _why_ended(ended, ended.incidents)
        raise _NotRehearsed(f"{ended.name}, which has no fault, failed: {why}")
    try:
        return read_steps(ended.run_dir)
    except FileNotFoundError:
        if may_fail:
            return Recording({}, {}, None)
        raise _NotRehearsed(_RECORDS_NOTHING) from None


def _require_begin(recording: Recording, step: int) -> None:
    """Require that a run begins at the step at which another one began."""
    begin = min((each.step for records in recording.values() for each in records), default=step)
    if begin != step:
        raise _NotRehearsed(
            f"of two runs, one begins at step {step} and one at step {begin}: the script resumes from a checkpoint "
            "that another run wrote. Let it write below the working directory, or resume from none"
        )


def _require_steady(first: Recording, second: Recording) -> frozenset[What]:
    """Return what differs between two runs without faults, which must have computed the same things."""
    difference, without = _unsteady(first, second)
    unseeded = [name.rpartition(" ")[2] for _, name in without if _is_random(name)]
    if difference is not None:
        raise _NotRehearsed(
            f"two runs without faults differ ({difference.sentence}): the script is not deterministic. "
            + (f"It does not seed {', '.join(sorted(unseeded))}. " if unseeded else "")
            + "See what torch.use_deterministic_algorithms(True) reports"
        )
    verdict = compare(first, second, without)
    if not verdict.equal:
        raise _NotRehearsed(f"two runs without faults differ ({verdict.sentence})")
    return without
