"""A rehearsal from its first run to its page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkpointless.faults.spec import parse
from checkpointless.launcher.agent.ranks.preload import PlatformMissingError
from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.report.verify import What, compare
from checkpointless.observability.telemetry import wording
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.testing.rehearsal.jobs import Ended, Plan, import_once, run_jobs
from checkpointless.testing.rehearsal.judge import (
    POINTS,
    Course,
    Outcome,
    Result,
    course_of,
    cut,
    draw,
    is_random,
    judge,
    messages_of,
    unsteady,
    why_ended,
)

# --- The page at the end of a rehearsal, for people and as data ---------------------------------------------------

EXACT, INEXACT, NOT_REHEARSED = 0, 1, 3
_LONGEST = 500


@dataclass(frozen=True)
class Page:
    """What a rehearsal found.

    Attributes:
        name: name of the script, module or recipe.
        problem: why it could not be rehearsed ("" if it was).
        course: what the runs without faults did; None if they failed.
        results: what came of each fault.
        not_compared: what differs between two runs without faults, and is left out.
        warnings: what the engine said in the runs.
        folder: where the runs are; None if they are not kept.
        seed: seed of the draws.
    """

    name: str
    problem: str = ""
    course: Course | None = None
    results: tuple[Result, ...] = ()
    not_compared: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    folder: Path | None = None
    seed: int = 0

    @property
    def worst(self) -> Sequence[Result]:
        """The results that are not as they should be."""
        return [each for each in self.results if each.outcome in (Outcome.INEXACT, Outcome.NOT_RECOVERED)]

    @property
    def status(self) -> int:
        """The exit status."""
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
        tried = sum(each.outcome is Outcome.EXACT for each in self.results)
        on = wording.plural(self.course.ranks, "rank")
        steps = wording.plural(self.course.steps, "step")
        return f"exact: {steps} on {on}, bit by bit, in {wording.plural(tried, 'run')} with a fault each"


def without_folder(page: Page) -> Page:
    """Return the page of a rehearsal whose runs are not kept."""
    return replace(page, folder=None)


def _contract(result: Result) -> str:
    if not result.points:
        return ""
    named = " or ".join(f"{each} ({POINTS[each]})" for each in result.points)
    sure = "points to" if len(result.points) == 1 or result.said else "may be"
    return f"; this {sure} docs/contract.md, {named}"


def show(page: Page, console: Console) -> None:
    """Print the page; long lines are left to the terminal, so that the last line is the verdict."""

    def say(text: str) -> None:
        console.print(wording.printable(text, _LONGEST), soft_wrap=True)

    course = page.course
    if course is not None:
        on, steps = wording.plural(course.ranks, "rank"), f"steps {course.first} to {course.last}"
        say(f"rehearsal of {page.name}: {on}, {steps}, two runs without faults")
        _say_all(say, _notes(page))
    if page.results:
        console.print(_table(page.results))
        say(f"tried: {_tried(page.results)}")
    for each in page.worst:
        say(f"{each.trial.fault}: {each.why}{_contract(each)}")
        _say_all(say, [f"said in that run: {text}" for text in each.said])
    _say_all(say, [f"warning: {text}" for text in page.warnings])
    if page.folder is not None:
        say(f"the runs are in {page.folder} (checkpointless report, verify); the same again: --seed {page.seed}")
    say(page.sentence)


def _notes(page: Page) -> list[str]:
    course = page.course
    notes = []
    if course is not None and course.first > 1:
        notes.append(f"the script resumed from a checkpoint after step {course.first - 1}")
    for reached, what in (
        () if course is None else ((course.epoch_ends, "epoch's end"), (course.validations, "validation"))
    ):
        if not reached:
            notes.append(
                f"no {what} was seen in these steps, so no fault came right after one: try more with --steps"
            )
    if page.not_compared:
        notes.append(f"not compared, because two runs without faults differ there: {', '.join(page.not_compared)}")
    return notes


def _say_all(say: Callable[[str], None], lines: Sequence[str]) -> None:
    for line in lines:
        say(f"- {line}")


def _tried(results: Sequence[Result]) -> str:
    """Name the ranks, steps and phases in which faults came."""
    specs = [parse(each.trial.fault) for each in results if each.outcome is not Outcome.NOT_TRIED]
    ranks = wording.numbered("rank", {spec.rank for spec in specs if spec.rank is not None})
    steps = wording.numbered("step", {spec.step for spec in specs if spec.step is not None})
    return f"{ranks}; {steps}; phases {', '.join(sorted({spec.phase.value for spec in specs}))}"


def _table(results: Sequence[Result]) -> Table:
    table = Table(
        "fault", "right after", "recovered", "result", title="one fault in each run", title_justify="left"
    )
    for each in results:
        took = "" if each.took_s is None or not each.rung else f"{each.rung}, {wording.duration(each.took_s)}"
        more = f" ({each.why})" if each.outcome in (Outcome.EXACT, Outcome.NOT_TRIED) and each.why else ""
        table.add_row(each.trial.fault, each.trial.after, took, f"{each.outcome.value}{more}")
    return table


def as_json(page: Page) -> str:
    """Return the page as JSON."""
    course = page.course
    return json.dumps(
        {
            "name": page.name,
            "verdict": {EXACT: "exact", INEXACT: "inexact", NOT_REHEARSED: "not rehearsed"}[page.status],
            "sentence": page.sentence,
            "problem": page.problem,
            "first_step": None if course is None else course.first,
            "last_step": None if course is None else course.last,
            "ranks": None if course is None else course.ranks,
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
                for each in page.results
            ],
            "not_compared": list(page.not_compared),
            "warnings": list(page.warnings),
            "seed": page.seed,
            "folder": None if page.folder is None else str(page.folder),
        },
        indent=1,
    )


_CALM = ("calm-1", "calm-2")
_RECORDS_NOTHING = (
    "no step was recorded: the training has to be Lightning's, NeMo's or Megatron-Bridge's, or a loop of one's own "
    "with PlainTraining or MegatronTraining"
)


@dataclass(frozen=True)
class Rehearsal:
    """What is to be rehearsed.

    Attributes:
        name: name of the script, module or recipe.
        plan: what its jobs have in common.
        faults: the number of faults.
        seed: seed of the draws.
        at_once: the largest number of jobs that run at a time.
        imports: whether this process imports what the jobs need, and forks them. A process that uses CUDA must not.
    """

    name: str
    plan: Plan
    faults: int
    seed: int
    at_once: int
    imports: bool = True


class _NotRehearsed(Exception):
    """Raised if a job cannot be rehearsed; the message says why and what to do."""


def rehearse(rehearsal: Rehearsal, say: Callable[[str], None]) -> Page:
    """Run the jobs of a rehearsal and judge them.

    Args:
        rehearsal: what is to be rehearsed.
        say: called with each line of progress.

    Raises:
        KeyboardInterrupt: Ctrl-C came; all jobs have been ended.
    """
    plan, name = rehearsal.plan, rehearsal.name
    if rehearsal.imports:
        say("importing what the ranks need, once for all jobs")
        try:
            plan = replace(plan, config=import_once(plan.config, plan.folder / "imports.txt"))
        except PlatformMissingError as error:
            return Page(name, str(error), None, folder=plan.folder, seed=rehearsal.seed)

    def run(jobs: Mapping[str, Sequence[str]]) -> list[Ended]:
        return run_jobs(plan, jobs, rehearsal.at_once, say)

    calm = run({each: () for each in _CALM})
    course: Course | None = None
    try:
        recordings = [_read(each) for each in calm]
        course = course_of(recordings[0], plan.steps)
        _require_begin(recordings[1], course.first)
        whole = all(each.code is not None for each in calm)
        reference, other = (cut(each, course, whole) for each in recordings)
        without = _unsteady(reference, other)
        trials = {
            f"fault-{number}": each for number, each in enumerate(draw(course, rehearsal.faults, rehearsal.seed), 1)
        }
    except (_NotRehearsed, ValueError) as error:
        warnings = tuple(messages_of([each.run_dir for each in calm]))
        return Page(name, str(error), course, warnings=warnings, folder=plan.folder, seed=rehearsal.seed)
    ended = run({each: (trial.fault,) for each, trial in trials.items()})
    results: list[Result] = []
    try:
        for each in ended:
            _require_begin(_read(each, may_fail=True), course.first)
        pairs = zip(trials.values(), ended, strict=True)
        results += [judge(trial, each, reference, course, without, whole) for trial, each in pairs]
        is_tried = any(each.outcome is not Outcome.NOT_TRIED for each in results)
        problem = "" if is_tried else "none of the faults came: the runs never reached those points"
    except _NotRehearsed as error:
        problem = str(error)
    return Page(
        name,
        problem,
        course,
        tuple(results),
        tuple(sorted(f"{each.value}{name and ' '}{name}" for each, name in without if not is_random(name))),
        tuple(messages_of(each.run_dir for each in (*calm, *ended))),
        plan.folder,
        rehearsal.seed,
    )


def _read(ended: Ended, may_fail: bool = False) -> Recording:
    """Return what a run recorded.

    Raises:
        NotRehearsed: it failed, or recorded nothing, and may not.
    """
    if not ended.is_good and not may_fail:
        why = why_ended(ended, summarize(read_events(ended.run_dir)))
        raise _NotRehearsed(f"{ended.name}, which has no fault, failed: {why}")
    try:
        return read_steps(ended.run_dir)
    except FileNotFoundError:
        if may_fail:
            return Recording({}, {}, None)
        raise _NotRehearsed(_RECORDS_NOTHING) from None


def _require_begin(recording: Recording, step: int) -> None:
    """Require that a run begins at the step at which another one began.

    Raises:
        NotRehearsed: it does not.
    """
    begin = min((each.step for records in recording.values() for each in records), default=step)
    if begin != step:
        raise _NotRehearsed(
            f"of two runs, one begins at step {step} and one at step {begin}: the script resumes from a checkpoint "
            "that another run wrote. Let it write below the working directory, or resume from none"
        )


def _unsteady(first: Recording, second: Recording) -> frozenset[What]:
    """Return what differs between two runs without faults, and is not computed.

    Raises:
        NotRehearsed: they computed different things.
    """
    difference, without = unsteady(first, second)
    unseeded = [name.rpartition(" ")[2] for _, name in without if is_random(name)]
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
