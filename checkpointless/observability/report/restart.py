"""Estimate of what a run's faults would have cost if each had been answered by a restart from the last checkpoint.

    cost of one fault = detection + requeue + start-up + checkpoint load + steps made again
    steps made again  = min(half the checkpoint interval, effective training so far)

The expected loss of work is half an interval, as in the first-order model of Young (1974, "A first order
approximation to the optimum checkpoint interval") and in the ETTR estimate of Kokolis et al. (see
:mod:`checkpointless.observability.report.ettr`). A fault that came while another one was handled belongs to the
:same restart.
Faults that ended the job are left out, since they need a restart in either case. The cost of writing checkpoints
during undisturbed training is not counted either. A figure that is neither given nor known from the run itself is
assumed in favour of the restart, so the result is too low rather than too high.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointless.observability.report.ettr import Activity, TimeAccount
from checkpointless.observability.report.incidents import IncidentSummary, Outcome
from checkpointless.observability.telemetry.event_names import EventName

#: Checkpoint interval of NeMo's recipes (``nemo.collections.llm.recipes.log.default``).
DEFAULT_INTERVAL_S = 15 * 60.0
#: Start-up time that is assumed if the log does not contain the run's own.
DEFAULT_STARTUP_S = 60.0
_NS_PER_S = 1e9


class Source(enum.Enum):
    """Where a figure comes from."""

    MEASURED = "measured in this run"
    GIVEN = "given"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class RestartOptions:
    """What the user specifies about a restart, in seconds; None takes the run's own figure or the default.

    Attributes:
        detect_s: time from a fault until the job is ended because of it.
        requeue_s: time from the end of the job until the scheduler starts it again.
        startup_s: time from the scheduler's start of the job to the first step, without loading the checkpoint.
        load_s: time to load the checkpoint.
        interval_s: training time between two checkpoints.
    """

    detect_s: float | None = None
    requeue_s: float | None = None
    startup_s: float | None = None
    load_s: float | None = None
    interval_s: float | None = None


@dataclass(frozen=True)
class Assumption:
    """One figure of the estimate.

    Attributes:
        name: name of the figure.
        seconds: value of the figure; None if each fault has a different one.
        source: where the value comes from.
        why: more about the source of the value.
        option: option of ``checkpointless report`` that sets the figure.
    """

    name: str
    seconds: float | None
    source: Source
    why: str
    option: str


@dataclass(frozen=True)
class Restart:
    """What one restart would have cost, and what the recovery cost instead, in seconds.

    Attributes:
        incidents: ids of the incidents that the restart would have answered; the last of them was resumed.
        detect_s: time until the fault is noticed.
        requeue_s: time until the job is started again.
        startup_s: time until the job can train.
        load_s: time to load the checkpoint.
        redo_s: time to repeat steps.
        redo_steps: number of steps to repeat; None if the duration of a step is not known.
        recovered_s: time that recovery took instead, including the steps that it repeated.
    """

    incidents: tuple[str, ...]
    detect_s: float
    requeue_s: float
    startup_s: float
    load_s: float
    redo_s: float
    redo_steps: float | None
    recovered_s: float

    @property
    def total_s(self) -> float:
        """The cost of the restart, in seconds."""
        return self.detect_s + self.requeue_s + self.startup_s + self.load_s + self.redo_s


@dataclass(frozen=True)
class Comparison:
    """Comparison of recovery in memory with restarts from a checkpoint.

    Attributes:
        assumptions: figures that the estimate rests on.
        restarts: the restarts that the recovered faults would have caused; overlapping faults share one.
        restart_s: total cost of the restarts, in seconds.
        recovered_s: total time that recovery took instead, in seconds.
        ettr: the run's ETTR if it had been restarted each time; None if the run's actual ETTR is not known.
        left_out: number of incidents that are not compared because they ended the job or have not ended yet.
    """

    assumptions: tuple[Assumption, ...]
    restarts: tuple[Restart, ...]
    restart_s: float
    recovered_s: float
    ettr: float | None
    left_out: int

    @property
    def factor(self) -> float | None:
        """The cost of the restarts divided by the cost of recovery; None without restarts."""
        return self.restart_s / self.recovered_s if self.recovered_s > 0 else None


def compare_with_restart(
    options: RestartOptions,
    spent: TimeAccount,
    incidents: Sequence[IncidentSummary],
    step_s: float | None,
    trained: bool,
) -> Comparison:
    """Estimate what the faults of a run would have cost with restarts from a checkpoint.

    Args:
        options: what the user specifies about restarts.
        spent: what the run's time was spent on.
        incidents: incidents of the run, in order.
        step_s: duration of an undisturbed step, in seconds; None if not known.
        trained: whether ``spent.startup_s`` is a complete start-up, from the first event to the first step.
    """
    assumptions = _assumptions(options, spent.startup_s if trained else None)
    figures = {each.name: each.seconds for each in assumptions}
    chains, left_out = _chains(incidents)
    restarts = tuple(_restart(chain, figures, spent, step_s) for chain in chains)
    restart_s = sum(restart.total_s for restart in restarts)
    recovered_s = sum(restart.recovered_s for restart in restarts)
    ettr = None
    if spent.training_s is not None and spent.wall_s > 0:
        ettr = spent.training_s / max(spent.wall_s - recovered_s + restart_s, spent.training_s)
    return Comparison(assumptions, restarts, restart_s, recovered_s, ettr, left_out)


def _restart(
    chain: Sequence[IncidentSummary], figures: Mapping[str, float | None], spent: TimeAccount, step_s: float | None
) -> Restart:
    """Estimate the restart that would have answered the incidents of one chain."""
    first, last = chain[0], chain[-1]
    detect_s = figures["detection"]
    redo_s = min((figures["checkpoint interval"] or 0.0) / 2, _training_before(spent, first.start_ns))
    lost_s = (last.steps_lost or 0) * (step_s or 0.0)
    end_ns = first.start_ns if last.end_ns is None else last.end_ns
    return Restart(
        incidents=tuple(incident.incident for incident in chain),
        detect_s=first.stages_s.get(EventName.DETECT, 0.0) if detect_s is None else detect_s,
        requeue_s=figures["requeue"] or 0.0,
        startup_s=figures["start-up"] or 0.0,
        load_s=figures["checkpoint load"] or 0.0,
        redo_s=redo_s,
        redo_steps=redo_s / step_s if step_s else None,
        recovered_s=max(0.0, (end_ns - first.start_ns) / _NS_PER_S) + lost_s,
    )


def _assumptions(options: RestartOptions, startup_s: float | None) -> tuple[Assumption, ...]:
    """Return the figures that the estimate rests on, in the order in which a restart spends them.

    Args:
        options: what the user specifies.
        startup_s: how long this run's own start-up took; None if the log does not say.
    """
    startup = (DEFAULT_STARTUP_S, Source.ASSUMED, "the log does not say how long this run's took")
    if startup_s is not None:
        why = "processes, imports, model and optimizer, until the first step"
        startup = (startup_s, Source.MEASURED, why)
    soon = "each fault as soon as here; at once where nobody knows when it happened"
    half = "as in NeMo's recipes; half of it is done again"
    figures = (
        ("detection", options.detect_s, (None, Source.MEASURED, soon), "--restart-detect"),
        ("requeue", options.requeue_s, (0.0, Source.ASSUMED, "the same nodes at once"), "--restart-requeue"),
        ("start-up", options.startup_s, startup, "--restart-startup"),
        ("checkpoint load", options.load_s, (0.0, Source.ASSUMED, "as if it took no time"), "--restart-load"),
        (
            "checkpoint interval",
            options.interval_s,
            (DEFAULT_INTERVAL_S, Source.ASSUMED, half),
            "--checkpoint-interval",
        ),
    )
    return tuple(
        Assumption(name, seconds, source, why, option)
        if given_s is None
        else Assumption(name, given_s, Source.GIVEN, "", option)
        for name, given_s, (seconds, source, why), option in figures
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


def _training_before(spent: TimeAccount, ns: int) -> float:
    return sum(
        (min(period.end_ns, ns) - period.begin_ns) / _NS_PER_S
        for period in spent.periods
        if period.activity is Activity.TRAINING and period.begin_ns < ns
    )
