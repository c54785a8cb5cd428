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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checkpointless.observability.report.incidents import IncidentSummary, Outcome
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event

_NS_PER_S = 1e9


class _Activity(enum.Enum):
    """What a run does during a period."""

    STARTUP = "start-up"
    TRAINING = "training"
    RECOVERY = "recovery"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class _Period:
    """A part of a run's time that was spent on one activity.

    Attributes:
        end_ns: end of the period, in UTC nanoseconds; later than ``begin_ns``.
    """

    activity: _Activity
    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The length of the period, in seconds."""
        return (self.end_ns - self.begin_ns) / _NS_PER_S


@dataclass(frozen=True)
class _Milestones:
    """The moments that divide a run's time, in UTC nanoseconds.

    Attributes:
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
        repeated_s: time spent on repeating steps; None if their number or their duration is not known.
        training_s: effective training time; None if it is not known when training began or what was repeated.
    """

    periods: tuple[_Period, ...]
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


def milestones(events: Iterable[Event]) -> _Milestones | None:
    """Return the moments at which the run began, trained and ended, or None without events."""
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
    return _Milestones(begin_ns, last_ns if job_ns is None else job_ns, trains_ns, max(trained, default=None))


def account(marks: _Milestones, incidents: Sequence[IncidentSummary], step_s: float | None) -> TimeAccount:
    """Account for a run's time.

    Args:
        incidents: the run's incidents, in order. An incident without an end lasts until the next incident or the
            end of the run.
        step_s: duration of an undisturbed step, in seconds; None if not known.
    """
    begin_ns, end_ns = marks.begin_ns, max(marks.end_ns, marks.begin_ns)
    trains_ns = end_ns if marks.trains_ns is None else marks.trains_ns
    periods: list[_Period] = []

    def spend(until_ns: int, activity: _Activity) -> None:
        at_ns = periods[-1].end_ns if periods else begin_ns
        until_ns = min(until_ns, end_ns)
        if until_ns <= at_ns:
            return
        if periods and periods[-1].activity is activity:
            at_ns = periods.pop().begin_ns
        periods.append(_Period(activity, at_ns, until_ns))

    for index, incident in enumerate(incidents):
        following_ns = incidents[index + 1].start_ns if index + 1 < len(incidents) else end_ns
        if index == 0:
            spend(min(trains_ns, incident.start_ns), _Activity.STARTUP)
        spend(incident.start_ns, _Activity.TRAINING)
        spend(following_ns if incident.end_ns is None else incident.end_ns, _Activity.RECOVERY)
    if not incidents:
        spend(trains_ns, _Activity.STARTUP)
    if marks.trained_ns is not None:
        spend(marks.trained_ns, _Activity.TRAINING)
        spend(end_ns, _Activity.SHUTDOWN)
    else:
        spend(end_ns, _Activity.TRAINING)

    spent = {activity: sum(each.seconds for each in periods if each.activity is activity) for activity in _Activity}
    repeated_s = _repeated_s(incidents, step_s)
    training_s = None
    if marks.trains_ns is not None and repeated_s is not None:
        training_s = max(0.0, spent[_Activity.TRAINING] - repeated_s)
    return TimeAccount(
        periods=tuple(periods),
        wall_s=(end_ns - begin_ns) / _NS_PER_S,
        startup_s=spent[_Activity.STARTUP],
        recovery_s=spent[_Activity.RECOVERY],
        shutdown_s=spent[_Activity.SHUTDOWN],
        repeated_s=repeated_s,
        training_s=training_s,
    )


def step_time_s(events: Iterable[Event], incidents: Sequence[IncidentSummary]) -> float | None:
    """Return the seconds per optimizer step in undisturbed training; None if no two moments of a generation say so.

    This is the time between the first step of each generation and the last moment at which its progress is known (a
    fault, the end of training, or an agent's note), divided by the number of steps in that time. It includes the
    other work of a training loop: validation, checkpoints, and the part of a step that a fault interrupted.
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


# --- What restarts from a checkpoint would have cost --------------------------------------------------------------
#
#     cost of one fault = detection + requeue + start-up + checkpoint load + steps made again
#     steps made again  = min(half the checkpoint interval, effective training so far)
#
# The expected loss of work is half an interval, as in the first-order model of Young (1974, "A first order
# approximation to the optimum checkpoint interval") and in Kokolis et al. A fault that came while another one was
# handled belongs to the same restart. Faults that ended the job are left out, since they need a restart in either
# case. The cost of writing checkpoints during undisturbed training is not counted either. A figure that is neither
# given nor known from the run itself is assumed in favour of the restart, so the result is too low rather than too
# high.


class Source(enum.Enum):
    """Where a figure comes from."""

    MEASURED = "measured in this run"
    GIVEN = "given"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class _Assumption:
    """One figure of the estimate.

    Attributes:
        seconds: value of the figure; None if each fault has a different one.
        option: option of ``checkpointless report`` that sets the figure.
    """

    name: str
    seconds: float | None
    source: Source
    why: str
    option: str


#: The figures in the order in which a restart spends them, as far as they are not given.
_FIGURES = (
    _Assumption(
        "detection",
        None,
        Source.MEASURED,
        "each fault as soon as here; at once where nobody knows when it happened",
        "--restart-detect",
    ),
    _Assumption("requeue", 0.0, Source.ASSUMED, "the same nodes at once", "--restart-requeue"),
    _Assumption(
        "start-up", 60.0, Source.ASSUMED, "the log does not say how long this run's took", "--restart-startup"
    ),
    _Assumption("checkpoint load", 0.0, Source.ASSUMED, "as if it took no time", "--restart-load"),
    _Assumption(  # nemo.collections.llm.recipes.log.default
        "checkpoint interval",
        15 * 60.0,
        Source.ASSUMED,
        "as in NeMo's recipes; half of it is done again",
        "--checkpoint-interval",
    ),
)


@dataclass(frozen=True)
class _Restart:
    """What one restart would have cost, and what the recovery cost instead, in seconds.

    Attributes:
        incidents: ids of the incidents that the restart would have answered; the last of them was resumed.
        redo_steps: number of steps to repeat; None if the duration of a step is not known.
    """

    incidents: tuple[str, ...]
    detect_s: float
    requeue_s: float
    startup_s: float
    load_s: float
    redo_s: float
    redo_steps: float | None
    recovered_s: float
    total_s: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of recovery in memory with restarts from a checkpoint.

    Attributes:
        restarts: the restarts that the recovered faults would have caused; overlapping faults share one.
        factor: the cost of the restarts divided by the cost of recovery; None without restarts.
        ettr: the run's ETTR if it had been restarted each time; None if the run's actual ETTR is not known.
        incidents_left_out: number of incidents that ended the job or have not ended yet, and are not compared.
    """

    assumptions: tuple[_Assumption, ...]
    restarts: tuple[_Restart, ...]
    restart_s: float
    recovered_s: float
    factor: float | None
    ettr: float | None
    incidents_left_out: int


def compare_with_restart(
    given: Mapping[str, float],
    spent: TimeAccount,
    incidents: Sequence[IncidentSummary],
    step_s: float | None,
    trained: bool,
) -> Comparison:
    """Estimate what the faults of a run would have cost with restarts from a checkpoint.

    Args:
        given: figures that the user gives, in seconds, by their option.
        step_s: duration of an undisturbed step, in seconds; None if not known.
        trained: whether ``spent.startup_s`` is a complete start-up, from the first event to the first step.
    """
    why = "processes, imports, model and optimizer, until the first step"
    measured = {"start-up": (spent.startup_s, why)} if trained else {}
    assumptions = tuple(
        _Assumption(each.name, given[each.option], Source.GIVEN, "", each.option)
        if each.option in given
        else _Assumption(each.name, *measured[each.name][:1], Source.MEASURED, measured[each.name][1], each.option)
        if each.name in measured
        else each
        for each in _FIGURES
    )
    figures = [each.seconds for each in assumptions]
    chains, left_out = _chains(incidents)
    restarts = tuple(_restart(chain, figures, spent, step_s) for chain in chains)
    restart_s = sum(restart.total_s for restart in restarts)
    recovered_s = sum(restart.recovered_s for restart in restarts)
    ettr = None
    if spent.training_s is not None and spent.wall_s > 0:
        ettr = spent.training_s / max(spent.wall_s - recovered_s + restart_s, spent.training_s)
    factor = restart_s / recovered_s if recovered_s > 0 else None
    return Comparison(assumptions, restarts, restart_s, recovered_s, factor, ettr, left_out)


def _restart(
    chain: Sequence[IncidentSummary], figures: Sequence[float | None], spent: TimeAccount, step_s: float | None
) -> _Restart:
    """Estimate the restart that would have answered the incidents of one chain."""
    first, last = chain[0], chain[-1]
    detect_s, *others = figures
    requeue_s, startup_s, load_s, interval_s = (each or 0.0 for each in others)
    if detect_s is None:
        detect_s = first.stages_s.get(EventName.DETECT, 0.0)
    trained_s = sum(
        (min(period.end_ns, first.start_ns) - period.begin_ns) / _NS_PER_S
        for period in spent.periods
        if period.activity is _Activity.TRAINING and period.begin_ns < first.start_ns
    )
    redo_s = min(interval_s / 2, trained_s)
    end_ns = first.start_ns if last.end_ns is None else last.end_ns
    return _Restart(
        incidents=tuple(incident.incident for incident in chain),
        detect_s=detect_s,
        requeue_s=requeue_s,
        startup_s=startup_s,
        load_s=load_s,
        redo_s=redo_s,
        redo_steps=redo_s / step_s if step_s else None,
        recovered_s=max(0.0, (end_ns - first.start_ns) / _NS_PER_S) + (last.steps_lost or 0) * (step_s or 0.0),
        total_s=detect_s + requeue_s + startup_s + load_s + redo_s,
    )


def _chains(incidents: Sequence[IncidentSummary]) -> tuple[list[list[IncidentSummary]], int]:
    """Group the incidents that one restart would have answered; also return how many belong to no restart."""
    chains: list[list[IncidentSummary]] = []
    open_chain: list[IncidentSummary] = []
    left_out = 0
    for incident in incidents:
        open_chain.append(incident)
        if incident.outcome is Outcome.ESCALATED:
            continue
        if incident.has_resumed:
            chains.append(open_chain)
        else:
            left_out += len(open_chain)
        open_chain = []
    return chains, left_out + len(open_chain)
