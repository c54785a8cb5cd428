"""A run's events as a trace that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

The format is the JSON object form of Chrome's trace-event format. It has a process for each node, with a thread for
the agent and one for each rank, and a process for the whole job. Stages are complete events (``X``), points are
instant events (``i``), and what an agent does for several ranks at once (``respawn``) is an asynchronous event
(``b``, ``e``). Times are microseconds since the first event, by UTC: monotonic clocks of different nodes cannot be
compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpointless.observability.report.goodput import CAUSES
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.summary import Report, utc
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event, json_safe

#: Process and thread ids are made up; they are unique in the whole trace, as viewers require.
_JOB_PID = 1
_FIRST_NODE_PID = 2
_RUN_TID, _INCIDENTS_TID = 1, 2
_FIRST_TID = 10
_LONGEST_TEXT = 4000


@dataclass
class _Span:
    """A stage of one rank, or of an agent. Without an ``end`` it was never finished, and lasts until the thread's
    next event.
    """

    begin: Event
    end: Event | None
    end_ns: int


@dataclass
class _Thread:
    """What is known of one rank, or of the agent (None), of one node."""

    node: int
    rank: int | None
    spans: list[_Span] = field(default_factory=list)
    points: list[Event] = field(default_factory=list)


def _threads(events: Iterable[Event]) -> list[_Thread]:
    """Match the begin and end events of each rank and agent."""
    by_thread: dict[tuple[int, int | None], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.ts):
        by_thread[event.node, event.rank].append(event)
    found: list[_Thread] = []
    for (node, rank), own in sorted(by_thread.items(), key=lambda item: _place(*item[0])):
        thread = _Thread(node, rank)
        found.append(thread)
        open_spans: dict[tuple[int, str, int], _Span] = {}
        for place, event in enumerate(own):
            key = (event.pid, event.stage, event.generation)
            if event.edge == "point":
                thread.points.append(event)
            elif event.edge == "begin":
                following = own[place + 1].ts if place + 1 < len(own) else event.ts
                open_spans[key] = _Span(event, None, following)
                thread.spans.append(open_spans[key])
            elif key in open_spans:
                span = open_spans.pop(key)
                span.end, span.end_ns = event, event.ts
    return found


def write_trace(report: Report, events: Sequence[Event]) -> str:
    """Return the trace of a run as JSON."""
    begin_ns = report.run.begin_ns or 0
    found = _threads(event for event in events if event.stage != EventName.JOB)
    meta = [
        _meta("process_name", _JOB_PID, 0, f"job {report.run.path}"),
        _meta("process_sort_index", _JOB_PID, 0, 0),
        _meta("thread_name", _JOB_PID, _RUN_TID, "run"),
        _meta("thread_name", _JOB_PID, _INCIDENTS_TID, "incidents"),
    ]
    for node in sorted({thread.node for thread in found}):
        meta.append(_meta("process_name", _FIRST_NODE_PID + node, 0, f"node {node}"))
        meta.append(_meta("process_sort_index", _FIRST_NODE_PID + node, 0, 1 + node))
    slices: list[dict[str, Any]] = []
    for tid, thread in enumerate(found, start=_FIRST_TID):
        pid = _FIRST_NODE_PID + thread.node
        name = "agent" if thread.rank is None else f"rank {thread.rank}"
        meta.append(_meta("thread_name", pid, tid, name))
        meta.append(_meta("thread_sort_index", pid, tid, -1 if thread.rank is None else thread.rank))
        slices += _nested(thread, pid, tid, begin_ns)
        slices += [_instant(event, pid, tid, begin_ns) for event in thread.points]
    slices += _of_job(report, begin_ns)
    slices.sort(key=lambda each: (each["ts"], -each.get("dur", 0)))
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"run": report.run.path, "begin": utc(report.run.begin_ns)},
        "traceEvents": [*meta, *slices],
    }
    return json.dumps(json_safe(document), separators=(",", ":"), allow_nan=False)


def _place(node: int, rank: int | None) -> tuple[int, int]:
    return node, -1 if rank is None else rank


def _nested(thread: _Thread, pid: int, tid: int, begin_ns: int) -> list[dict[str, Any]]:
    """Return the trace events of a thread's spans; spans may nest but not overlap otherwise, as viewers require."""
    made: list[dict[str, Any]] = []
    around: list[int] = []
    for number, span in enumerate(thread.spans):
        event = span.begin
        common = {"name": event.stage, "cat": "stage", "pid": pid, "tid": tid, "args": _about(span)}
        # This is an agent's span, on the thread of a rank whose processes change meanwhile.
        if event.stage == EventName.RESPAWN:
            for phase, ns in (("b", event.ts), ("e", span.end_ns)):
                own_id = {"local": f"{tid}.{number}"}  # local to this process, and shown with it
                made.append({**common, "ph": phase, "id2": own_id, "ts": _us(ns, begin_ns)})
            continue
        while around and around[-1] <= event.ts:
            around.pop()
        end_ns = max(event.ts, min([span.end_ns, *around[-1:]]))
        around.append(end_ns)
        ts = _us(event.ts, begin_ns)
        made.append({**common, "ph": "X", "ts": ts, "dur": round(_us(end_ns, begin_ns) - ts, 3)})
    return made


def _of_job(report: Report, begin_ns: int) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def add(tid: int, name: str, from_ns: int, to_ns: int, args: dict[str, Any]) -> None:
        ts = _us(from_ns, begin_ns)
        dur = round(max(0.0, _us(to_ns, begin_ns) - ts), 3)
        made.append(
            {"name": name, "cat": "job", "ph": "X", "pid": _JOB_PID, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    for period in report.periods:
        name = period.cause if period.cause in CAUSES else "recovery"
        add(_RUN_TID, name, period.begin_ns, period.end_ns, {"cause": period.cause})
    reached_ns = begin_ns
    for number, incident in enumerate(report.incidents, start=1):
        later = report.incidents[number : number + 1]
        until_ns = later[0].start_ns if later else report.run.end_ns or incident.start_ns
        if incident.end_ns is not None:
            until_ns = min(incident.end_ns, until_ns) if later else incident.end_ns
        from_ns = max(incident.start_ns, reached_ns)
        reached_ns = max(from_ns, until_ns)
        add(_INCIDENTS_TID, f"#{number} {incident.kind}", from_ns, reached_ns, _of_incident(incident))
    return made


def _of_incident(incident: IncidentSummary) -> dict[str, Any]:
    return {
        "cause": incident.cause[:_LONGEST_TEXT],
        "culprit": incident.culprit,
        "rung": incident.rung.label,
        "outcome": incident.outcome.value,
        "seconds": incident.headline_s,
        "resumed_after_step": incident.resumed_after,
        "steps_lost": incident.steps_lost,
        "bytes": incident.nbytes,
        "sources": list(incident.sources),
        "tiers": {tier: list(ranks) for tier, ranks in incident.tiers.items()},
    }


def _about(span: _Span) -> dict[str, Any]:
    fields = {**span.begin.fields, **({} if span.end is None else span.end.fields)}
    said = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in fields.items()}
    said |= {"generation": span.begin.generation, "incident": span.begin.incident, "os_pid": span.begin.pid}
    return said if span.end is not None else {**said, "unfinished": True}


def _instant(event: Event, pid: int, tid: int, begin_ns: int) -> dict[str, Any]:
    said = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in event.fields.items()}
    return {
        "name": event.stage,
        "cat": "fault" if event.stage == EventName.FAULT_INJECTED else "moment",
        "ph": "i",
        "s": "t",
        "pid": pid,
        "tid": tid,
        "ts": _us(event.ts, begin_ns),
        "args": {**said, "generation": event.generation, "incident": event.incident, "os_pid": event.pid},
    }


def _meta(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    """Return the name of a process or thread, or its place among the others."""
    args = {"name" if isinstance(value, str) else "sort_index": value}
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _us(ns: int, begin_ns: int) -> float:
    return round((ns - begin_ns) / 1000, 3)
