"""The page at the end of a rehearsal, for people and as data."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkpointless.faults.spec import parse
from checkpointless.observability.telemetry import wording
from checkpointless.testing.rehearsal.judge import POINTS, Outcome, Result
from checkpointless.testing.rehearsal.plan import Course

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
