"""Rendering of the page from its template."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from checkpointless.report.incidents import IncidentSummary, Outcome, by_incident
from checkpointless.report.page import pictures
from checkpointless.report.summary import PHASE_OF, PHASES, Report, RunState, utc
from checkpointless.telemetry import wording
from checkpointless.telemetry.events import Event

#: If there are more incidents than this, only the most informative ones are shown in full.
_MOST_IN_FULL = 20
_SLOWEST = 6
_OPEN = 2
_LONGEST_TEXT = 600
_TRACEBACK_LINES = 60


@dataclass(frozen=True)
class IncidentView:
    """An incident as the page shows it.

    Attributes:
        number: number of the incident in the run, from 1.
        incident: the incident.
        samples_lost: number of samples that were processed again; None if not known.
        bars: time of the incident by stage, on a scale that all incidents share.
        in_full: whether everything about the incident is shown.
        lanes: what each rank did; empty if the incident is not shown in full.
        lanes_hidden: number of ranks that are not shown.
        restart_s: what a restart would have cost, in seconds; None if the incident is not compared.
        traceback: last lines of the traceback of the rank that failed; empty if it raised nothing.
    """

    number: int
    incident: IncidentSummary
    samples_lost: int | None
    bars: tuple[pictures.Bar, ...]
    in_full: bool
    lanes: tuple[pictures.Lane, ...] = ()
    lanes_hidden: int = 0
    restart_s: float | None = None
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True)
class KindView:
    """All incidents of one kind.

    Attributes:
        kind: kind of the faults.
        count: number of incidents.
        resumed: number of incidents after which training resumed.
        median_s: median duration of the incidents after which training resumed, in seconds; None without any.
        longest_s: longest duration of the incidents after which training resumed, in seconds; None without any.
        rungs: levels to which the recoveries escalated.
    """

    kind: str
    count: int
    resumed: int
    median_s: float | None
    longest_s: float | None
    rungs: tuple[str, ...]


def render(report: Report, events: Sequence[Event], tracebacks: Mapping[str, str] | None = None) -> str:
    """Render the page.

    Args:
        report: report of the run.
        events: all events of the run, in any order.
        tracebacks: tracebacks of the ranks that failed, by the incident's id.
    """
    views = _views(report, events, tracebacks or {})
    field, field_top_s = pictures.incident_field(report)
    return _template().render(
        css=Markup(_text("report.css")),
        report=report,
        run=report.run,
        spent=report.spent,
        comparison=report.comparison,
        is_empty=report.run.state is RunState.EMPTY,
        state=report.run.state.name.lower(),
        strip=pictures.run_strip(report),
        marks=pictures.incident_marks(report),
        field=field,
        field_top_s=field_top_s,
        compared=_compared(report),
        phases=PHASES,
        stages_total_s=sum(stage.tile_s for stage in report.stages) or 1.0,
        stages_longest_s=max((stage.longest_s for stage in report.stages), default=0.0) or 1.0,
        phase_of=PHASE_OF,
        kinds=_kinds(report),
        in_full=[view for view in views if view.in_full],
        views=views,
        open_first=_OPEN,
        Outcome=Outcome,
        took_median_s=median(_took(report.incidents)) if _took(report.incidents) else None,
        plural=wording.plural,
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters.update(
        plain=lambda text, limit=_LONGEST_TEXT: wording.printable(str(text), limit),
        duration=wording.duration,
        size=wording.size,
        share=wording.share,
        number=wording.number,
        ranks=functools.partial(wording.numbered, "rank"),
        utc=_readable_utc,
        pc=lambda value: f"{value:.3f}%",
    )
    return environment.from_string(_text("report.html"))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _compared(report: Report) -> tuple[pictures.Lane, ...]:
    comparison = report.comparison
    return pictures.comparison_lanes(comparison) if comparison is not None and comparison.restarts else ()


def _views(report: Report, events: Sequence[Event], tracebacks: Mapping[str, str]) -> list[IncidentView]:
    groups: Mapping[str, Sequence[Event]] = by_incident(events)
    longest_s = max((sum(incident.tiles_s.values()) for incident in report.incidents), default=0.0)
    shown = _telling(report.incidents)
    restarts = (
        {}
        if report.comparison is None
        else {restart.incidents[-1]: restart.total_s for restart in report.comparison.restarts}
    )
    views = []
    for number, incident in enumerate(report.incidents, start=1):
        lanes: tuple[pictures.Lane, ...] = ()
        hidden = 0
        if incident.incident in shown:
            lanes, hidden = pictures.rank_lanes(incident, groups.get(incident.incident, ()))
        views.append(
            IncidentView(
                number=number,
                incident=incident,
                samples_lost=report.samples(incident.steps_lost),
                bars=pictures.tile_bars(incident, longest_s),
                in_full=incident.incident in shown,
                lanes=lanes,
                lanes_hidden=hidden,
                restart_s=restarts.get(incident.incident),
                traceback=_last_lines(tracebacks.get(incident.incident, "")),
            )
        )
    return views


def _last_lines(text: str) -> tuple[str, ...]:
    """Return the last lines of a traceback, with their indentation."""
    lines = text.rstrip().splitlines()[-_TRACEBACK_LINES:]
    return tuple(
        " " * min(len(line) - len(line.lstrip(" ")), 40) + wording.printable(line, _LONGEST_TEXT) for line in lines
    )


def _telling(incidents: Sequence[IncidentSummary]) -> set[str]:
    """Return the ids of the incidents to be shown in full.

    If there are few incidents, they are all of them; if there are many, those that ended badly, the slowest ones,
    and one of each kind.
    """
    if len(incidents) <= _MOST_IN_FULL:
        return {incident.incident for incident in incidents}
    badly = [each for each in incidents if each.outcome is not Outcome.RESUMED]
    slowest = sorted(incidents, key=lambda each: -(each.headline_s or 0.0))[:_SLOWEST]
    of_each_kind = {each.kind: each for each in reversed(incidents)}.values()
    chosen = [*badly[-_SLOWEST:], *slowest, *of_each_kind]
    return {each.incident for each in chosen[:_MOST_IN_FULL]}


def _kinds(report: Report) -> list[KindView]:
    by_kind: dict[str, list[IncidentSummary]] = defaultdict(list)
    for incident in report.incidents:
        by_kind[incident.kind].append(incident)
    views = []
    for kind, count in report.kinds.items():
        took = _took(by_kind[kind])
        rungs = sorted({incident.rung for incident in by_kind[kind]})
        views.append(
            KindView(
                kind=kind,
                count=count,
                resumed=sum(1 for each in by_kind[kind] if each.has_resumed),
                median_s=median(took) if took else None,
                longest_s=max(took, default=None),
                rungs=tuple(rung.label for rung in rungs),
            )
        )
    return views


def _took(incidents: Sequence[IncidentSummary]) -> list[float]:
    return [incident.headline_s for incident in incidents if incident.headline_s is not None]


def _readable_utc(ns: int | None) -> str:
    text = utc(ns)
    return wording.UNKNOWN if text is None else f"{text[:10]} {text[11:19]} UTC"
