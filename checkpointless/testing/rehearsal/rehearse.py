"""A rehearsal from its first run to its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.report.verify import What, compare
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import Recording, read_steps
from checkpointless.testing.rehearsal.jobs import Ended, Plan, import_once, run_jobs
from checkpointless.testing.rehearsal.judge import (
    Outcome,
    Result,
    cut,
    is_random,
    judge,
    messages_of,
    unsteady,
    why_ended,
)
from checkpointless.testing.rehearsal.page import Page
from checkpointless.testing.rehearsal.plan import Course, course_of, draw

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


class NotRehearsed(Exception):
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
        plan = replace(plan, config=import_once(plan.config, plan.folder / "imports.txt"))

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
    except (NotRehearsed, ValueError) as error:
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
    except NotRehearsed as error:
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
        raise NotRehearsed(f"{ended.name}, which has no fault, failed: {why}")
    try:
        return read_steps(ended.run_dir)
    except FileNotFoundError:
        if may_fail:
            return Recording({}, {}, None)
        raise NotRehearsed(_RECORDS_NOTHING) from None


def _require_begin(recording: Recording, step: int) -> None:
    """Require that a run begins at the step at which another one began.

    Raises:
        NotRehearsed: it does not.
    """
    begin = min((each.step for records in recording.values() for each in records), default=step)
    if begin != step:
        raise NotRehearsed(
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
        raise NotRehearsed(
            f"two runs without faults differ ({difference.sentence}): the script is not deterministic. "
            + (f"It does not seed {', '.join(sorted(unseeded))}. " if unseeded else "")
            + "See what torch.use_deterministic_algorithms(True) reports"
        )
    verdict = compare(first, second, without)
    if not verdict.equal:
        raise NotRehearsed(f"two runs without faults differ ({verdict.sentence})")
    return without
