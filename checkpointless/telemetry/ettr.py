"""What a run's time was spent on, and the share of it that was effective training (ETTR).

ETTR is the ratio of productive time to the wall-clock time of a run (Kokolis et al., "Revisiting Reliability in
Large-Scale Machine Learning Research Clusters", HPCA 2025, arXiv:2410.21680). There the time that a job waits for
the scheduler counts as wall-clock time too; a run directory knows nothing of that, so here the clock starts with
the job:

    wall     = first event of the job .. its end (or the last event, while there is none)
    start-up = the first event .. the last rank begins its first step
    recovery = from each fault .. the last rank has made its next step (incidents that overlap count once)
    shutdown = the last rank has made its last step .. end
    repeated = steps that were committed, lost, and made again, times the time of a step
    training = wall - start-up - recovery - shutdown - repeated
    ETTR     = training / wall

An incident's clock runs until the step that it interrupted has been made, although that step is effective; the part
of it that was done before the fault counts as training instead. So the two cancel, to within a step per incident,
and the error is never in favour of recovery.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpointless.telemetry.events import Event
from checkpointless.telemetry.incidents import JOB, IncidentSummary, Outcome

PROGRESS = "progress"
TRAINED = "trained"
_NS_PER_S = 1e9


class Activity(enum.Enum):
    """What a run does at a time."""

    STARTUP = "start-up"
    TRAINING = "training"
    RECOVERY = "recovery"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class Period:
    """A piece of a run's time.

    Attributes:
        activity: what it was spent on.
        begin_ns: UTC nanoseconds.
        end_ns: UTC nanoseconds, later.
    """

    activity: Activity
    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.end_ns - self.begin_ns) / _NS_PER_S


@dataclass(frozen=True)
class Milestones:
    """The moments of a run that its time is cut at, UTC nanoseconds.

    Attributes:
        begin_ns: the first event of the job.
        end_ns: its end; while there is none, its last event.
        trains_ns: the last rank of the first generation began its first step; None if no event says so.
        trained_ns: the last rank was through with its last step; None if no event says so.
    """

    begin_ns: int
    end_ns: int
    trains_ns: int | None = None
    trained_ns: int | None = None


@dataclass(frozen=True)
class TimeAccount:
    """What a run's time was spent on. Seconds.

    Attributes:
        periods: the whole time, piece by piece.
        wall_s: from the first event to the end.
        startup_s: until training began.
        recovery_s: in incidents.
        shutdown_s: after the last step.
        repeated_s: making steps again; None if it is not known how many or how long they take.
        training_s: effective training; None if it is not known when training began, or what was repeated.
    """

    periods: tuple[Period, ...]
    wall_s: float
    startup_s: float
    recovery_s: float
    shutdown_s: float
    repeated_s: float | None
    training_s: float | None

    @property
    def ettr(self) -> float | None:
        """Effective training time over wall-clock time, in [0, 1]; None if unknown."""
        return self.training_s / self.wall_s if self.training_s is not None and self.wall_s > 0 else None

    @property
    def ettr_while_training(self) -> float | None:
        """The same without start-up and shutdown, which a short run has as well as a long one; None if unknown."""
        underway_s = self.wall_s - self.startup_s - self.shutdown_s
        return self.training_s / underway_s if self.training_s is not None and underway_s > 0 else None


def milestones(events: Iterable[Event]) -> Milestones | None:
    """When the run began, trained and ended; None without events.

    Args:
        events: all events of the run, in any order.
    """
    begin_ns: int | None = None
    last_ns = 0
    job_ns: int | None = None
    first_steps: dict[int, list[int]] = defaultdict(list)
    blocks: dict[int, int] = {}
    trained: list[int] = []
    for event in events:
        begin_ns = event.ts if begin_ns is None else min(begin_ns, event.ts)
        last_ns = max(last_ns, event.ts)
        if event.stage == JOB and event.edge == "end":
            job_ns = max(event.ts, job_ns or 0)
        elif event.stage == "first_step" and event.edge == "begin":
            first_steps[event.generation].append(event.ts)
        elif event.stage == "go":
            blocks[event.generation] = max(event.ts, blocks.get(event.generation, 0))
        elif event.stage == TRAINED:
            trained.append(event.ts)
    if begin_ns is None:
        return None
    # A block that is no training loop we know trains as soon as it is entered, for all that is known.
    trains_ns = max(first_steps[min(first_steps)]) if first_steps else blocks.get(min(blocks, default=0))
    return Milestones(begin_ns, last_ns if job_ns is None else job_ns, trains_ns, max(trained, default=None))


def account(marks: Milestones, incidents: Sequence[IncidentSummary], step_s: float | None) -> TimeAccount:
    """Say what a run's time was spent on.

    Args:
        marks: when it began, trained and ended.
        incidents: its incidents, in order. One that did not end lasts until the next one or the end of the run.
        step_s: seconds of an undisturbed step; None if not known.
    """
    begin_ns, end_ns = marks.begin_ns, max(marks.end_ns, marks.begin_ns)
    trains_ns = end_ns if marks.trains_ns is None else marks.trains_ns
    periods: list[Period] = []

    def spend(until_ns: int, activity: Activity) -> None:
        at_ns = periods[-1].end_ns if periods else begin_ns
        until_ns = min(until_ns, end_ns)
        if until_ns <= at_ns:
            return
        if periods and periods[-1].activity is activity:
            at_ns = periods.pop().begin_ns
        periods.append(Period(activity, at_ns, until_ns))

    for index, incident in enumerate(incidents):
        following_ns = incidents[index + 1].start_ns if index + 1 < len(incidents) else end_ns
        if index == 0:
            spend(min(trains_ns, incident.start_ns), Activity.STARTUP)
        spend(incident.start_ns, Activity.TRAINING)
        spend(following_ns if incident.end_ns is None else incident.end_ns, Activity.RECOVERY)
    if not incidents:
        spend(trains_ns, Activity.STARTUP)
    if marks.trained_ns is not None:
        spend(marks.trained_ns, Activity.TRAINING)
        spend(end_ns, Activity.SHUTDOWN)
    else:
        spend(end_ns, Activity.TRAINING)

    spent = {activity: sum(each.seconds for each in periods if each.activity is activity) for activity in Activity}
    repeated_s = _repeated_s(incidents, step_s)
    training_s = None
    if marks.trains_ns is not None and repeated_s is not None:
        training_s = max(0.0, spent[Activity.TRAINING] - repeated_s)
    return TimeAccount(
        periods=tuple(periods),
        wall_s=(end_ns - begin_ns) / _NS_PER_S,
        startup_s=spent[Activity.STARTUP],
        recovery_s=spent[Activity.RECOVERY],
        shutdown_s=spent[Activity.SHUTDOWN],
        repeated_s=repeated_s,
        training_s=training_s,
    )


def step_time_s(events: Iterable[Event], incidents: Sequence[IncidentSummary]) -> float | None:
    """Seconds per optimizer step in undisturbed training; None if no two moments of a generation say so.

    The time between the first step of each generation and the last moment at which its progress is known (a fault,
    the end of training, or an agent's note), over the steps made in it. It includes what else a training loop does:
    validation, checkpoints, and the part of a step that a fault interrupted.

    Args:
        events: all events of the run, in any order.
        incidents: its incidents.
    """
    began: dict[int, tuple[int, int]] = {}
    reached: dict[int, tuple[int, int]] = {}

    def note(place: dict[int, tuple[int, int]], generation: int, ns: int, step: object) -> None:
        if isinstance(step, int) and step > 0:
            place[generation] = max((step, ns), place.get(generation, (step, ns)))

    for event in events:
        if event.stage == "first_step" and event.edge == "end":
            note(began, event.generation, event.ts, event.fields.get("step"))
        elif event.stage == TRAINED:
            note(reached, event.generation, event.ts, event.fields.get("step"))
        elif event.stage == PROGRESS:
            note(reached, event.generation, event.ts, event.fields.get("high_water"))
    for incident in incidents:
        note(reached, incident.generation, incident.start_ns, incident.committed)
    steps = spent_ns = 0
    for generation, (step, ns) in reached.items():
        first_step, first_ns = began.get(generation, (step, ns))
        if step > first_step and ns > first_ns:
            steps += step - first_step
            spent_ns += ns - first_ns
    return spent_ns / _NS_PER_S / steps if steps else None


def _repeated_s(incidents: Iterable[IncidentSummary], step_s: float | None) -> float | None:
    lost = [incident.steps_lost for incident in incidents if incident.outcome is Outcome.RESUMED]
    if any(each is None for each in lost):
        return None
    steps = sum(each for each in lost if each is not None)
    if steps == 0:
        return 0.0
    return None if step_s is None else steps * step_s
