"""Accounting of a run's time, and of the share that was effective training (ETTR).

ETTR is the ratio of productive time to the wall-clock time of a run (Kokolis et al., "Revisiting Reliability in
Large-Scale Machine Learning Research Clusters", HPCA 2025, arXiv:2410.21680). In the paper, the wall-clock time
includes the time that a job waits for the scheduler. A run directory has no record of that wait, so here the clock
starts with the job:

    wall     = first event of the job .. its end (or the last event, while there is none)
    start-up = first event .. the last rank begins its first step
    recovery = each fault .. the last rank has completed its next step (incidents that overlap count once)
    shutdown = the last rank has completed its last step .. end
    repeated = number of steps that were committed, lost and repeated, times the duration of a step
    training = wall - start-up - recovery - shutdown - repeated
    ETTR     = training / wall

An incident's clock runs until the interrupted step has been completed, although that step is effective training. In
exchange, the part of the step that was done before the fault counts as training. The two cancel to within one step
per incident, and the error is never in favour of recovery.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event

_NS_PER_S = 1e9


class Activity(enum.Enum):
    """What a run does during a period."""

    STARTUP = "start-up"
    TRAINING = "training"
    RECOVERY = "recovery"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class Period:
    """A part of a run's time that was spent on one activity.

    Attributes:
        activity: what the time was spent on.
        begin_ns: beginning of the period, in UTC nanoseconds.
        end_ns: end of the period, in UTC nanoseconds; later than ``begin_ns``.
    """

    activity: Activity
    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The length of the period, in seconds."""
        return (self.end_ns - self.begin_ns) / _NS_PER_S


@dataclass(frozen=True)
class Milestones:
    """The moments that divide a run's time, in UTC nanoseconds.

    Attributes:
        begin_ns: the first event of the job.
        end_ns: the end of the job; its last event while there is no end.
        trains_ns: when the last rank of the first generation began its first step, or if no event says so, when
            that generation began; None if no event says that either.
        trained_ns: when the last rank had finished its last step; None if no event says so.
    """

    begin_ns: int
    end_ns: int
    trains_ns: int | None = None
    trained_ns: int | None = None


@dataclass(frozen=True)
class TimeAccount:
    """How a run's time was spent, in seconds.

    Attributes:
        periods: the periods that make up the whole time, in order.
        wall_s: time from the first event to the end.
        startup_s: time until training began.
        recovery_s: time in incidents.
        shutdown_s: time after the last step.
        repeated_s: time spent on repeating steps; None if their number or their duration is not known.
        training_s: effective training time; None if it is not known when training began or what was repeated.
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
        """ETTR without start-up and shutdown, which short and long runs alike have; None if unknown."""
        underway_s = self.wall_s - self.startup_s - self.shutdown_s
        return self.training_s / underway_s if self.training_s is not None and underway_s > 0 else None


def milestones(events: Iterable[Event]) -> Milestones | None:
    """Return the moments at which the run began, trained and ended, or None without events.

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
        if event.stage == EventName.JOB and event.edge == "end":
            job_ns = max(event.ts, job_ns or 0)
        elif event.stage == EventName.FIRST_STEP and event.edge == "begin":
            first_steps[event.generation].append(event.ts)
        elif event.stage == EventName.GO:
            blocks[event.generation] = max(event.ts, blocks.get(event.generation, 0))
        elif event.stage == EventName.TRAINED:
            trained.append(event.ts)
    if begin_ns is None:
        return None
    # A block that is not a training loop we know counts as training from its entry: nothing else is known.
    trains_ns = max(first_steps[min(first_steps)]) if first_steps else blocks.get(min(blocks, default=0))
    return Milestones(begin_ns, last_ns if job_ns is None else job_ns, trains_ns, max(trained, default=None))


def account(marks: Milestones, incidents: Sequence[IncidentSummary], step_s: float | None) -> TimeAccount:
    """Account for a run's time.

    Args:
        marks: when the run began, trained and ended.
        incidents: the run's incidents, in order. An incident without an end lasts until the next incident or the
            end of the run.
        step_s: duration of an undisturbed step, in seconds; None if not known.
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
    """Return the seconds per optimizer step in undisturbed training; None if no two moments of a generation say so.

    This is the time between the first step of each generation and the last moment at which its progress is known (a
    fault, the end of training, or an agent's note), divided by the number of steps in that time. It includes the
    other work of a training loop: validation, checkpoints, and the part of a step that a fault interrupted.

    Args:
        events: all events of the run, in any order.
        incidents: the run's incidents.
    """
    began: dict[int, tuple[int, int]] = {}
    reached: dict[int, tuple[int, int]] = {}

    def note(place: dict[int, tuple[int, int]], generation: int, ns: int, step: object) -> None:
        if isinstance(step, int) and step > 0:
            place[generation] = max((step, ns), place.get(generation, (step, ns)))

    for event in events:
        if event.stage == EventName.FIRST_STEP and event.edge == "end":
            note(began, event.generation, event.ts, event.fields.get("step"))
        elif event.stage == EventName.TRAINED:
            note(reached, event.generation, event.ts, event.fields.get("step"))
        elif event.stage == EventName.PROGRESS:
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
    lost = [incident.steps_lost for incident in incidents if incident.has_resumed]
    if any(each is None for each in lost):
        return None
    steps = sum(each for each in lost if each is not None)
    if steps == 0:
        return 0.0
    return None if step_s is None else steps * step_s
