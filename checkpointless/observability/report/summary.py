"""The report of a run, built once for the terminal and JSON, so that both say the same."""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from statistics import median
from typing import Any

from checkpointless.observability.report.goodput import (
    SAVES,
    SHUTDOWN,
    STARTUP,
    STRAGGLERS,
    TRAINING,
    Goodput,
    Spell,
)
from checkpointless.observability.report.incidents import IncidentSummary, Outcome, summarize
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import Event, json_safe

_NS_PER_S = 1e9
_MOST_S = 1e10


@dataclass(frozen=True)
class _Milestones:
    """The times that divide a run's time, in UTC nanoseconds."""

    begin_ns: int
    end_ns: int  # the end of the job; its last event while there is no end
    # when the last rank of the first generation began its first step, or if that is not known, when that generation
    # began; None if no event says that either
    trains_ns: int | None = None
    trained_ns: int | None = None  # when the last rank had finished its last step; None if not known


def _milestones(events: Sequence[Event]) -> _Milestones | None:
    """Return the times at which the run began, trained and ended, or None without events."""
    if not events:
        return None

    def of(name: EventName, *edges: str) -> list[Event]:
        return [event for event in events if event.stage == name and event.edge in edges]

    times = [event.ts for event in events]
    launched = min(((event.ts, _was_at_ns(event)) for event in of(EventName.JOB, "begin", "point")), default=None)
    # A block that is not a training loop we know counts as training from its entry: nothing else is known.
    begun = of(EventName.FIRST_STEP, "begin") or of(EventName.GO, "begin", "end", "point")
    first = min((event.generation for event in begun), default=0)
    trained = (_was_at_ns(event) for event in events if event.stage == EventName.TRAINED)
    return _Milestones(
        min(times) if launched is None else min(*times, launched[1]),
        max((event.ts for event in of(EventName.JOB, "end")), default=max(times)),
        max((event.ts for event in begun if event.generation == first), default=None),
        max(trained, default=None),
    )


def _was_at_ns(event: Event) -> int:
    """Return when what an event reports was, if that was before it was written."""
    return event.ts - round(_seconds(event.fields.get("before_s")) * _NS_PER_S)


def _periods(marks: _Milestones, incidents: Sequence[IncidentSummary]) -> tuple[Spell, ...]:
    """Divide a run's time into start-up, training, incidents (until the next one, without an end) and shutdown."""
    end_ns = max(marks.end_ns, marks.begin_ns)
    trains_ns = end_ns if marks.trains_ns is None else marks.trains_ns
    periods: list[Spell] = []

    def spend(until_ns: int, cause: str, by: IncidentSummary | None = None) -> None:
        at_ns = periods[-1].end_ns if periods else marks.begin_ns
        until_ns = min(until_ns, end_ns)
        if until_ns <= at_ns:
            return
        if by is not None:
            periods.append(Spell(cause, at_ns, until_ns, 1.0, by.culprit, by.node, by.who))
            return
        if periods and periods[-1].cause == cause:
            at_ns = periods.pop().begin_ns
        periods.append(Spell(cause, at_ns, until_ns))

    for index, incident in enumerate(incidents):
        following_ns = incidents[index + 1].start_ns if index + 1 < len(incidents) else end_ns
        if index == 0:
            spend(min(trains_ns, incident.start_ns), STARTUP)
        spend(incident.start_ns, TRAINING)
        spend(following_ns if incident.end_ns is None else incident.end_ns, incident.label, incident)
    if not incidents:
        spend(trains_ns, STARTUP)
    if marks.trained_ns is not None:
        spend(marks.trained_ns, TRAINING)
        spend(end_ns, SHUTDOWN)
    else:
        spend(end_ns, TRAINING)
    return tuple(periods)


def _step_time_s(events: Iterable[Event], incidents: Sequence[IncidentSummary]) -> float | None:
    """Return the seconds per step, with the loop's other work, over generations of several steps, if there are."""
    began: dict[int, tuple[int, int]] = {}
    reached: dict[int, tuple[int, int]] = {}

    def note(place: dict[int, tuple[int, int]], generation: int, ns: int, step: object) -> None:
        if isinstance(step, int) and step > 0:
            place[generation] = max((step, ns), place.get(generation, (step, ns)))

    for event in events:
        if event.stage == EventName.FIRST_STEP and event.edge == "end":
            note(began, event.generation, event.ts, event.fields.get("step"))
        elif event.stage == EventName.TRAINED:
            note(reached, event.generation, _was_at_ns(event), event.fields.get("step"))
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


#: Version of the JSON format; it changes when a field changes its meaning or is removed.
FORMAT = 2
_OF_STEPS_IN_PROGRESS = (EventName.FAULT_INJECTED, EventName.STALL, EventName.INEXACT)


class RunState(enum.Enum):
    """The state of a run."""

    EMPTY = "nothing recorded"
    SUCCEEDED = "ended well"
    FAILED = "failed"
    OPEN = "no end in its log: in progress, killed, or not launched by checkpointless"


@dataclass(frozen=True)
class _Run:
    """A run as a whole, without its incidents; None for what is not known."""

    path: str
    state: RunState
    reason: str = ""
    script: str = ""
    nnodes: int | None = None
    nproc: int | None = None
    begin_ns: int | None = None
    end_ns: int | None = None
    first_step: int | None = None
    last_step: int | None = None  # newest step that any event mentions
    step_s: float | None = None  # duration of an undisturbed step, in seconds
    caused: Mapping[str, int] | None = None
    lines_left_out: int = 0

    @property
    def steps(self) -> int | None:
        """How many optimizer steps it has made, those that are repeated counted once; None if not known."""
        if self.first_step is None or self.last_step is None:
            return None
        return max(0, self.last_step - self.first_step + 1)


@dataclass(frozen=True)
class _StageFigures:
    """Times of one stage over all incidents with it, on the slowest rank; ``tile_s`` is without overlap."""

    stage: str
    count: int
    median_s: float
    longest_s: float
    tile_s: float


@dataclass(frozen=True)
class _Straggler:
    """A rank that was slow by itself; ``why`` is ``compute`` or ``data``."""

    rank: int
    node: int | None
    why: str
    step: int | None  # the newest committed step when it was found
    own_s: float  # what it did by itself in a step when it was found; usually it would have been ``usual_s``
    usual_s: float
    # until it was as fast as others, or the generation was over; None: until the end of the run
    lasted_s: float | None
    begin_ns: int  # when it was found, in UTC nanoseconds
    until_step: int | None = None  # the newest committed step at its end

    def spell(self, end_ns: int, last_step: int | None) -> Spell:
        """Return for which share of its time others waited for it: what is too long, in each of its steps."""
        until_ns = end_ns if self.lasted_s is None else self.begin_ns + round(self.lasted_s * _NS_PER_S)
        newest = last_step if self.lasted_s is None else self.until_step
        steps = 0 if newest is None or self.step is None else newest - self.step
        slow_s = max(0.0, self.own_s - self.usual_s)
        per_s = steps * _NS_PER_S / (until_ns - self.begin_ns) if steps > 0 and until_ns > self.begin_ns else 0.0
        share = min(1.0, slow_s * per_s)
        return Spell(STRAGGLERS, self.begin_ns, until_ns, share, self.rank, self.node)


@dataclass(frozen=True)
class Report:
    """A run and its incidents; without events, ``goodput`` is None. The ``periods`` tile the run's time."""

    run: _Run
    incidents: tuple[IncidentSummary, ...] = ()
    stages: tuple[_StageFigures, ...] = ()
    periods: tuple[Spell, ...] = ()
    # Device checks that failed (``remedy``: ``give_up`` for a spare, or ``try``), checkpoints that could not be
    # saved, and gradients that a rank computed wrongly (``redone``: not only in a check).
    devices: Sequence[Mapping[str, Any]] = ()
    failed_saves: Sequence[Mapping[str, Any]] = ()
    corrupted: Sequence[Mapping[str, Any]] = ()
    stragglers: tuple[_Straggler, ...] = ()
    goodput: Goodput | None = None

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
        """The number of committed steps that had to be repeated; None if it is not known of one incident."""
        lost = [incident.steps_lost for incident in self.incidents if incident.has_resumed]
        known = [each for each in lost if each is not None]
        return sum(known) if len(known) == len(lost) else None


def build_report(
    path: str,
    events: Sequence[Event],
    *,
    caused: Mapping[str, int] | None = None,
    lines_left_out: int = 0,
) -> Report:
    """Build the report of a run."""
    marks = _milestones(events)
    if marks is None:
        return Report(_Run(path, RunState.EMPTY, caused=caused, lines_left_out=lines_left_out))
    incidents = tuple(summarize(events))
    step_s = _step_time_s(events, incidents)
    periods = _periods(marks, incidents)
    jobs = [event for event in events if event.stage == EventName.JOB]
    begins = [event.fields for event in jobs if event.edge == "begin"]
    end = max((event for event in jobs if event.edge == "end"), key=lambda event: event.ts, default=None)
    has_succeeded = end is not None and end.fields.get("code") == 0
    run = _Run(
        path=path,
        state=RunState.SUCCEEDED if has_succeeded else RunState.OPEN if end is None else RunState.FAILED,
        reason="" if has_succeeded or end is None else _first_line(end.fields.get("reason")),
        script=next((str(each["script"]) for each in begins if each.get("script")), ""),
        nnodes=_newest(begins, "nnodes"),
        nproc=_newest(begins, "nproc"),
        begin_ns=marks.begin_ns,
        end_ns=marks.end_ns,
        first_step=_first_step(events),
        last_step=_last_step(events),
        step_s=step_s,
        caused=caused,
        lines_left_out=lines_left_out,
    )
    stragglers = _stragglers(events)
    return Report(
        run,
        incidents,
        _stage_figures(incidents),
        periods,
        [*_bad_devices(events)],
        [*_failed_saves(events)],
        [*_corrupted(events)],
        stragglers,
        _goodput(run, marks, periods, _repeated_s(incidents, step_s), events, stragglers),
    )


def _goodput(
    run: _Run,
    marks: _Milestones,
    periods: Sequence[Spell],
    repeated_s: float | None,
    events: Sequence[Event],
    stragglers: Sequence[_Straggler],
) -> Goodput:
    end_ns = max(marks.begin_ns, marks.end_ns)
    whole = Goodput(
        marks.begin_ns,
        end_ns,
        is_known=marks.trains_ns is not None and repeated_s is not None,
        first_step=run.first_step,
        last_step=run.last_step,
        step_s=run.step_s,
    )
    saves = (
        Spell(SAVES, event.ts - round(_seconds(event.fields.get("seconds")) * _NS_PER_S), event.ts)
        for event in events
        if event.stage == EventName.SAVED
    )
    within = [*saves, *(each.spell(end_ns, run.last_step) for each in stragglers)]
    return whole.spent_on(periods, within, repeated_s or 0.0)


def _stragglers(events: Sequence[Event]) -> tuple[_Straggler, ...]:
    found: list[_Straggler] = []
    open_at: dict[int, tuple[int, int]] = {}  # by rank: its place in the list, and since when
    for event in _in_order(events, EventName.STRAGGLER):
        rank, fields = event.rank, event.fields
        if rank is None:
            continue
        if event.edge == "begin":
            open_at[rank] = len(found), event.ts
            own_s, usual_s = (_seconds(fields.get(name)) for name in ("own_s", "usual_s"))
            node, step = (_whole(fields.get(name)) for name in ("on_node", "step"))
            found.append(_Straggler(rank, node, str(fields.get("why")), step, own_s, usual_s, None, event.ts))
        elif rank in open_at:
            place, since_ns = open_at.pop(rank)
            lasted_s = (event.ts - since_ns) / _NS_PER_S
            found[place] = replace(found[place], lasted_s=lasted_s, until_step=_whole(fields.get("step")))
    return tuple(found)


def _bad_devices(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for event in _in_order(events, EventName.BAD_DEVICE):
        said = {name: str(event.fields.get(name)) for name in ("why", "remedy")}
        yield {"node": str(event.fields.get("node_number")), "rank": event.rank, **said}


def _failed_saves(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for event in _in_order(events, EventName.SAVE_FAILED):
        said = {name: str(event.fields.get(name)) for name in ("path", "reason")}
        yield {**said, "ranks": [rank for rank in event.fields.get("ranks") or () if isinstance(rank, int)]}


def _corrupted(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for event in _in_order(events, EventName.CORRUPTED):
        fields = event.fields
        yield {
            "rank": event.rank,
            "step": fields.get("step"),
            "parameter": str(fields.get("parameter")),
            "parameters": int(fields.get("parameters") or 1),
            "redone": bool(fields.get("redone")),
        }


def _in_order(events: Sequence[Event], name: EventName) -> list[Event]:
    return sorted((event for event in events if event.stage == name), key=lambda event: event.ts)


@dataclass(frozen=True)
class Job:
    """The runs of a job, in the order in which they began, of which there is one at least."""

    runs: tuple[Report, ...]
    goodput: Goodput | None

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Job:
        """Put the runs of a job together; ``ValueError`` if two overlap."""
        runs = tuple(sorted(reports, key=lambda report: report.run.begin_ns or 0))
        known = [report.goodput for report in runs if report.goodput is not None]
        return cls(runs, Goodput.of_job(known) if known else None)

    def as_json(self) -> str:
        """Return it as JSON, of several runs in ``runs``: durations in seconds, times as ISO 8601 in UTC."""
        document = _plain(self.runs[0])
        if len(self.runs) > 1:
            goodput = None if self.goodput is None else self.goodput.as_json()
            document = {"format": FORMAT, "goodput": goodput, "runs": [_plain(each) for each in self.runs]}
        return json.dumps(json_safe(document), indent=2, allow_nan=False)


def _plain(report: Report) -> dict[str, Any]:
    run = report.run
    return {
        "format": FORMAT,
        "run": {
            **_without_ns(run),
            "state": run.state.name.lower(),
            "begin": utc(run.begin_ns),
            "end": utc(run.end_ns),
            "caused": dict(run.caused or {}),
        },
        "time": {
            "periods": [
                {"cause": each.cause, "begin": utc(each.begin_ns), "seconds": each.seconds}
                for each in report.periods
            ]
        },
        "goodput": None if report.goodput is None else report.goodput.as_json(),
        "steps_lost": report.steps_lost,
        "outcomes": {outcome.value: count for outcome, count in report.outcomes.items()},
        "kinds": report.kinds,
        "stages": [asdict(each) for each in report.stages],
        "devices": report.devices,
        "failed_saves": report.failed_saves,
        "stragglers": [_without_ns(each) for each in report.stragglers],
        "corrupted": report.corrupted,
        "incidents": [_incident(number, each) for number, each in enumerate(report.incidents, start=1)],
    }


def _without_ns(part: Any) -> dict[str, Any]:  # Any: a dataclass
    return {key: value for key, value in asdict(part).items() if not key.endswith("_ns")}


def utc(ns: int | None) -> str | None:
    """Format UTC nanoseconds as ISO 8601, to the millisecond; None for None or if a date cannot hold them."""
    if ns is None:
        return None
    try:
        at = datetime.fromtimestamp(ns // 1_000_000 / 1000, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _incident(number: int, incident: IncidentSummary) -> dict[str, Any]:
    return {
        "number": number,
        **_without_ns(incident),
        "kind": incident.kind,
        "rung": incident.rung.label,
        "outcome": incident.outcome.value,
        "begin": utc(incident.start_ns),
        "end": utc(incident.end_ns),
        "steps_lost": incident.steps_lost,
    }


def _seconds(value: object) -> float:
    return value if isinstance(value, int | float) and 0 <= value < _MOST_S else 0.0


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _first_line(said: object) -> str:
    return str(next(iter(said), "")) if isinstance(said, list | tuple) else str(said or "")


def _newest(fields: Sequence[Mapping[str, Any]], name: str) -> int | None:
    values = [each[name] for each in fields if isinstance(each.get(name), int)]
    return values[-1] if values else None


def _first_step(events: Sequence[Event]) -> int | None:
    """Return the first step of the first generation that came to one, whether it was made or not."""
    begun = [
        each for each in events if each.stage == EventName.FIRST_STEP and isinstance(each.fields.get("step"), int)
    ]
    return min(((each.generation, each.fields["step"]) for each in begun), default=(0, None))[1]


def _last_step(events: Sequence[Event]) -> int | None:
    committed = [event for event in events if event.stage not in _OF_STEPS_IN_PROGRESS]
    committed = [event for event in committed if (event.stage, event.edge) != (EventName.FIRST_STEP, "begin")]
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
