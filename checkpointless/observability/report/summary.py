"""The report of a run, built once for the terminal and JSON, so that both say the same."""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Any

from checkpointless.observability.report.ettr import (
    Comparison,
    TimeAccount,
    account,
    compare_with_restart,
    milestones,
    step_time_s,
)
from checkpointless.observability.report.incidents import IncidentSummary, Outcome, summarize
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import Event, json_safe

#: Version of the JSON format; it changes when a field changes its meaning or is removed.
FORMAT = 1
SAMPLES_PER_STEP = "samples_per_step"
#: Groups of stages, in order; each group has one colour in the bars.
PHASES: Mapping[str, tuple[EventName, ...]] = {
    "notice": (EventName.DETECT, EventName.NOTIFY),
    "stop": (EventName.ABORT, EventName.FINALIZE, EventName.HEALTH),
    "meet": (EventName.RESPAWN, EventName.BARRIER),
    "rebuild": (EventName.ENTER, EventName.INIT, EventName.REBUILD),
    "restore": (EventName.DECIDE, EventName.TRANSFER, EventName.VERIFY),
    "resume": (EventName.DATA, EventName.FIRST_STEP),
}
PHASE_OF: Mapping[str, str] = {stage: phase for phase, stages in PHASES.items() for stage in stages}

_OF_STEPS_IN_PROGRESS = (EventName.FAULT_INJECTED, EventName.STALL, EventName.INEXACT)


class RunState(enum.Enum):
    """The state of a run."""

    EMPTY = "nothing recorded"
    SUCCEEDED = "ended well"
    FAILED = "failed"
    OPEN = "no end in its log: in progress, killed, or not launched by checkpointless"


@dataclass(frozen=True)
class Run:
    """A run as a whole, without its incidents.

    Attributes:
        reason: why the run failed ("" if it did not, or if no event says so).
        nnodes: number of nodes; None if no event says so.
        nproc: number of ranks; None if no event says so.
        begin_ns: UTC nanoseconds of the run's first event; None without events.
        last_step: newest step that any event mentions; None if none does.
        step_s: duration of an undisturbed step, in seconds; None if not known.
        samples_per_step: number of samples that the whole job processes in a step; None if not known.
    """

    path: str
    state: RunState
    reason: str = ""
    script: str = ""
    nnodes: int | None = None
    nproc: int | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    last_step: int | None = None
    step_s: float | None = None
    samples_per_step: int | None = None
    caused: Mapping[str, int] | None = None
    lines_left_out: int = 0


@dataclass(frozen=True)
class _StageFigures:
    """Times of one stage over all incidents in which it happened, in seconds, on the slowest rank of each.

    Attributes:
        longest_s: longest time of the stage.
        tile_s: time that the stage accounts for in all incidents together, without overlap with other stages.
    """

    stage: str
    count: int
    median_s: float
    longest_s: float
    tile_s: float


@dataclass(frozen=True)
class _BadDevice:
    """A device check that failed.

    Attributes:
        remedy: what was done: ``give_up`` (a spare took the node's place) or ``try`` (the rank was started).
    """

    node: str
    rank: int | None
    why: str
    remedy: str


@dataclass(frozen=True)
class _FailedSave:
    """A checkpoint on storage that could not be saved."""

    path: str
    reason: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Report:
    """A run and its incidents.

    Attributes:
        stages: times of the stages over all incidents, in the order of the stages.
        spent: what the run's time was spent on; None without events.
        comparison: what restarts from a checkpoint would have cost; None without events.
        failed_saves: checkpoints on storage that could not be saved.
    """

    run: Run
    incidents: tuple[IncidentSummary, ...] = ()
    stages: tuple[_StageFigures, ...] = ()
    spent: TimeAccount | None = None
    comparison: Comparison | None = None
    devices: tuple[_BadDevice, ...] = ()
    failed_saves: tuple[_FailedSave, ...] = ()

    @property
    def outcomes(self) -> Mapping[Outcome, int]:
        """The number of incidents by outcome."""
        counts = Counter(incident.outcome for incident in self.incidents)
        return {outcome: counts[outcome] for outcome in Outcome}

    @property
    def kinds(self) -> Mapping[str, int]:
        """The number of incidents by kind, the most frequent kind first."""
        return dict(Counter(incident.kind for incident in self.incidents).most_common())

    @property
    def steps_lost(self) -> int | None:
        """The number of committed steps that had to be repeated; None if one incident does not tell."""
        lost = [incident.steps_lost for incident in self.incidents if incident.has_resumed]
        known = [each for each in lost if each is not None]
        return sum(known) if len(known) == len(lost) else None

    @property
    def samples_lost(self) -> int | None:
        """The number of samples that had to be processed again; None if not known."""
        return self.samples(self.steps_lost)

    def samples(self, steps: int | None) -> int | None:
        """Return the number of samples in ``steps`` steps; None if not known."""
        if steps == 0:
            return 0
        if steps is None or self.run.samples_per_step is None:
            return None
        return steps * self.run.samples_per_step


def build_report(
    path: str,
    events: Sequence[Event],
    *,
    caused: Mapping[str, int] | None = None,
    lines_left_out: int = 0,
    given: Mapping[str, float] | None = None,
) -> Report:
    """Build the report of a run.

    Args:
        given: what a restart from a checkpoint would cost, in seconds, by the option of ``checkpointless report``.
    """
    marks = milestones(events)
    if marks is None:
        return Report(Run(path, RunState.EMPTY, caused=caused, lines_left_out=lines_left_out))
    incidents = tuple(summarize(events))
    step_s = step_time_s(events, incidents)
    spent = account(marks, incidents, step_s)
    trained = marks.trains_ns is not None and not (incidents and incidents[0].start_ns < marks.trains_ns)
    comparison = compare_with_restart(given or {}, spent, incidents, step_s, trained)
    jobs = [event for event in events if event.stage == EventName.JOB]
    begins = [event.fields for event in jobs if event.edge == "begin"]
    ends = sorted((event for event in jobs if event.edge == "end"), key=lambda event: event.ts)
    run = Run(
        path=path,
        state=_state(ends[-1] if ends else None),
        reason="" if not ends or ends[-1].fields.get("code") == 0 else _first_line(ends[-1].fields.get("reason")),
        script=next((str(each["script"]) for each in begins if each.get("script")), ""),
        nnodes=_newest(begins, "nnodes"),
        nproc=_newest(begins, "nproc"),
        begin_ns=marks.begin_ns,
        end_ns=marks.end_ns,
        last_step=_last_step(events),
        step_s=step_s,
        samples_per_step=_newest(
            [event.fields for event in events if event.stage == EventName.DATA], SAMPLES_PER_STEP
        ),
        caused=caused,
        lines_left_out=lines_left_out,
    )
    return Report(
        run, incidents, _stage_figures(incidents), spent, comparison, _bad_devices(events), failed_saves(events)
    )


def _bad_devices(events: Sequence[Event]) -> tuple[_BadDevice, ...]:
    """Return the device checks that failed, in their order."""
    return tuple(
        _BadDevice(str(fields.get("node_number")), rank, str(fields.get("why")), str(fields.get("remedy")))
        for rank, fields in _in_order(events, EventName.BAD_DEVICE)
    )


def failed_saves(events: Sequence[Event]) -> tuple[_FailedSave, ...]:
    """Return the checkpoints that could not be saved, in the order in which they were due."""
    return tuple(
        _FailedSave(
            str(fields.get("path")),
            str(fields.get("reason")),
            tuple(rank for rank in fields.get("ranks") or () if isinstance(rank, int)),
        )
        for _, fields in _in_order(events, EventName.SAVE_FAILED)
    )


def _in_order(events: Sequence[Event], name: EventName) -> list[tuple[int | None, Mapping[str, Any]]]:
    found = sorted((event for event in events if event.stage == name), key=lambda event: event.ts)
    return [(event.rank, event.fields) for event in found]


def as_json(report: Report) -> str:
    """Return the report as a JSON document.

    Durations are in seconds, moments are in UTC as ISO 8601, and unknown values are null.
    """
    run, spent = report.run, report.spent
    document: dict[str, Any] = {
        "format": FORMAT,
        "run": {
            **{key: value for key, value in asdict(run).items() if not key.endswith("_ns")},
            "state": run.state.name.lower(),
            "begin": utc(run.begin_ns),
            "end": utc(run.end_ns),
            "caused": dict(run.caused or {}),
        },
        "time": spent
        and {
            "wall_s": spent.wall_s,
            "startup_s": spent.startup_s,
            "training_s": spent.training_s,
            "recovery_s": spent.recovery_s,
            "repeated_s": spent.repeated_s,
            "shutdown_s": spent.shutdown_s,
            "ettr": spent.ettr,
            "ettr_while_training": spent.ettr_while_training,
            "periods": [
                {"activity": each.activity.value, "begin": utc(each.begin_ns), "seconds": each.seconds}
                for each in spent.periods
            ],
        },
        "steps_lost": report.steps_lost,
        "samples_lost": report.samples_lost,
        "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
        "kinds": report.kinds,
        "stages": [asdict(each) for each in report.stages],
        "devices": [asdict(each) for each in report.devices],
        "failed_saves": [asdict(each) for each in report.failed_saves],
        "incidents": [_incident(number, each, report) for number, each in enumerate(report.incidents, start=1)],
        "restart_from_checkpoint": report.comparison and asdict(report.comparison),
    }
    return json.dumps(json_safe(document), indent=2, allow_nan=False)


def utc(ns: int | None) -> str | None:
    """Format UTC nanoseconds as ISO 8601, to the millisecond; None for None or if a date cannot hold them."""
    if ns is None:
        return None
    try:
        at = datetime.fromtimestamp(ns // 1_000_000 / 1000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _incident(number: int, incident: IncidentSummary, report: Report) -> dict[str, Any]:
    plain = {key: value for key, value in asdict(incident).items() if not key.endswith("_ns")}
    return {
        "number": number,
        **plain,
        "kind": incident.kind,
        "rung": incident.rung.label,
        "outcome": incident.outcome.value,
        "begin": utc(incident.start_ns),
        "end": utc(incident.end_ns),
        "steps_lost": incident.steps_lost,
        "samples_lost": report.samples(incident.steps_lost),
    }


def _state(end: Event | None) -> RunState:
    if end is None:
        return RunState.OPEN
    return RunState.SUCCEEDED if end.fields.get("code") == 0 else RunState.FAILED


def _first_line(said: object) -> str:
    return str(next(iter(said), "")) if isinstance(said, list | tuple) else str(said or "")


def _newest(fields: Sequence[Mapping[str, Any]], name: str) -> int | None:
    values = [each[name] for each in fields if isinstance(each.get(name), int)]
    return values[-1] if values else None


def _last_step(events: Sequence[Event]) -> int | None:
    committed = [event for event in events if event.stage not in _OF_STEPS_IN_PROGRESS]
    known = [event.fields.get(name) for event in committed for name in ("step", "high_water", "target")]
    return max((step for step in known if isinstance(step, int) and step >= 0), default=None)


def _stage_figures(incidents: Sequence[IncidentSummary]) -> tuple[_StageFigures, ...]:
    longest: dict[str, list[float]] = defaultdict(list)
    tiles: dict[str, float] = defaultdict(float)
    for incident in incidents:
        for stage, seconds in incident.stages_s.items():
            longest[stage].append(seconds)
        for stage, seconds in incident.tiles_s.items():
            tiles[stage] += seconds
    return tuple(
        _StageFigures(stage, len(longest[stage]), median(longest[stage]), max(longest[stage]), tiles[stage])
        for stage in STAGES
        if longest.get(stage)
    )
