"""The pictures of the page as plain values: bars on a line and dots in a field, with positions in per cent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointless.report.incidents import IncidentSummary
from checkpointless.report.restart import Comparison
from checkpointless.report.summary import PHASE_OF, Report
from checkpointless.report.trace import Thread, threads
from checkpointless.telemetry.event_names import STAGES, EventName
from checkpointless.telemetry.events import Event
from checkpointless.telemetry.wording import duration, printable

_MOST_LANES = 16
_NS_PER_S = 1e9


@dataclass(frozen=True)
class Bar:
    """A bar on a line.

    Attributes:
        x: beginning of the bar, in per cent of the line.
        width: width of the bar, in per cent of the line.
        css: CSS class of the bar, for its colour.
        title: description of the bar, in words.
    """

    x: float
    width: float
    css: str
    title: str


@dataclass(frozen=True)
class Lane:
    """A line of bars with a name.

    Attributes:
        name: text before the line.
        bars: bars on the line.
        note: text after the line.
    """

    name: str
    bars: tuple[Bar, ...]
    note: str = ""


@dataclass(frozen=True)
class Dot:
    """A point in a field.

    Attributes:
        x: distance from the left, in per cent.
        y: distance from the top, in per cent.
        css: CSS class of the dot.
        title: description of the dot, in words.
    """

    x: float
    y: float
    css: str
    title: str


def run_strip(report: Report) -> tuple[Bar, ...]:
    """Return bars that show what the run's time was spent on, from left to right."""
    if report.spent is None or not report.spent.periods:
        return ()
    begin_ns = report.spent.periods[0].begin_ns
    span_ns = max(1, report.spent.periods[-1].end_ns - begin_ns)
    return tuple(
        Bar(
            x=100 * (period.begin_ns - begin_ns) / span_ns,
            width=100 * (period.end_ns - period.begin_ns) / span_ns,
            css=period.activity.value,
            title=f"{period.activity.value}, {duration(period.seconds)}",
        )
        for period in report.spent.periods
    )


def incident_marks(report: Report) -> tuple[Dot, ...]:
    """Return a dot for each incident, at the moment of the run at which the incident began."""
    begin_ns, end_ns = report.run.begin_ns or 0, report.run.end_ns or 0
    span_ns = max(1, end_ns - begin_ns)
    return tuple(
        Dot(
            x=min(100.0, 100 * max(0, incident.start_ns - begin_ns) / span_ns),
            y=0.0,
            css=incident.outcome.name.lower(),
            title=f"incident {number}: {_headline(incident)}",
        )
        for number, incident in enumerate(report.incidents, start=1)
    )


def incident_field(report: Report) -> tuple[tuple[Dot, ...], float]:
    """Return a dot for each incident, by its beginning and duration, and the seconds at the top of the field."""
    took = [incident.headline_s or 0.0 for incident in report.incidents]
    top_s = _round_up(max(took, default=0.0))
    return tuple(
        Dot(mark.x, 100 - 100 * min(seconds / top_s, 1.0), mark.css, mark.title)
        for mark, seconds in zip(incident_marks(report), took, strict=True)
    ), top_s


def tile_bars(incident: IncidentSummary, longest_s: float | None = None) -> tuple[Bar, ...]:
    """Return bars that show one incident's time, stage by stage, without overlap.

    Args:
        incident: the incident.
        longest_s: time that corresponds to 100 %, in seconds; None: the length of this incident.
    """
    whole_s = longest_s or sum(incident.tiles_s.values()) or 1.0
    bars, at_s = [], 0.0
    for stage, seconds in incident.tiles_s.items():
        bars.append(
            Bar(100 * at_s / whole_s, 100 * seconds / whole_s, PHASE_OF[stage], f"{stage}, {duration(seconds)}")
        )
        at_s += seconds
    return tuple(bars)


def comparison_lanes(comparison: Comparison) -> tuple[Lane, Lane]:
    """Return a lane for recovery and a lane for restarts, on one scale."""
    whole_s = max(comparison.restart_s, comparison.recovered_s) or 1.0
    parts = {
        "detection": sum(restart.detect_s for restart in comparison.restarts),
        "requeue": sum(restart.requeue_s for restart in comparison.restarts),
        "start-up": sum(restart.startup_s for restart in comparison.restarts),
        "checkpoint load": sum(restart.load_s for restart in comparison.restarts),
        "steps made again": sum(restart.redo_s for restart in comparison.restarts),
    }
    bars, at_s = [], 0.0
    for name, seconds in parts.items():
        css = f"restart-{name.replace(' ', '-')}"
        bars.append(Bar(100 * at_s / whole_s, 100 * seconds / whole_s, css, f"{name}, {duration(seconds)}"))
        at_s += seconds
    ours = Bar(0.0, 100 * comparison.recovered_s / whole_s, "ours", f"recovery, {duration(comparison.recovered_s)}")
    return (
        Lane("recovery in memory", (ours,), f"{duration(comparison.recovered_s)}, measured"),
        Lane("restart from checkpoint", tuple(bars), f"{duration(comparison.restart_s)}, estimated"),
    )


def rank_lanes(incident: IncidentSummary, events: Sequence[Event]) -> tuple[tuple[Lane, ...], int]:
    """Return lanes that show what each rank did in an incident, and the number of ranks that are not shown.

    If there are too many ranks, those that the incident was about come first: the rank that failed, ranks with a
    new process, and ranks that sent state.

    Args:
        incident: the incident.
        events: events of the incident.
    """
    until_ns = incident.end_ns or max((event.ts for event in events), default=incident.start_ns)
    span_ns = max(1, until_ns - incident.start_ns)
    found = [
        thread
        for thread in threads(event for event in events if event.stage != EventName.FAULT_INJECTED)
        if thread.rank is not None and thread.spans
    ]
    told_of = {incident.culprit, *incident.respawned, *incident.sources}
    shown = sorted(found, key=lambda thread: thread.rank not in told_of)[:_MOST_LANES]
    lanes = tuple(
        Lane(
            f"rank {thread.rank}",
            tuple(_stage_bars(thread, incident.start_ns, span_ns)),
            _role(thread.rank, incident),
        )
        for thread in sorted(shown, key=lambda thread: thread.rank or 0)
    )
    return lanes, len(found) - len(shown)


def _stage_bars(thread: Thread, start_ns: int, span_ns: int) -> list[Bar]:
    bars = []
    for span in thread.spans:
        stage = span.begin.stage
        if stage not in STAGES and stage != EventName.RESPAWN:
            continue
        begin = min(max(0.0, 100 * (span.begin.ts - start_ns) / span_ns), 100.0)
        end = min(max(begin, 100 * (span.end_ns - start_ns) / span_ns), 100.0)
        seconds = max(0, span.end_ns - span.begin.ts) / _NS_PER_S
        error = span.end.fields.get("error") if span.end is not None else "interrupted"
        title = f"{stage}, {duration(seconds)}" + (f": {printable(str(error), 120)}" if error else "")
        css = "respawn" if stage == EventName.RESPAWN else PHASE_OF[stage]
        bars.append(Bar(begin, end - begin, css, title))
    return sorted(bars, key=lambda bar: bar.css != "respawn")  # what is drawn later lies on top


def _role(rank: int | None, incident: IncidentSummary) -> str:
    roles = []
    if rank == incident.culprit:
        roles.append("failed")
    if rank in incident.respawned:
        roles.append("new process")
    if rank in incident.sources:
        roles.append("source")
    return ", ".join(roles)


def _headline(incident: IncidentSummary) -> str:
    kind = printable(incident.kind, 40)
    if incident.has_resumed:
        return f"{kind}, {duration(incident.headline_s)}{', not exact' if incident.inexact else ''}"
    return f"{kind}, {incident.outcome.value}"


def _round_up(value: float) -> float:
    """Round up to 1, 2, 5 or 10 times a power of ten."""
    if not 0 < value < math.inf:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next((factor * unit for factor in (1, 2, 5) if factor * unit >= value), 10 * unit)
