"""A run's events as a trace, in Chrome's JSON object format, that Perfetto and ``chrome://tracing`` open.

It has a process for each node, with a thread for the agent and one for each rank, and a process for the whole job.
Stages are complete events (``X``), points are instant events (``i``), and what an agent does for several ranks at
once is an asynchronous event (``b``, ``e``). Times are microseconds since the first event, by UTC: monotonic clocks
of different nodes cannot be compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
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


#: The begin of a stage of one rank or agent, its end (None: it was never finished), and until when it lasted.
_Span = tuple[Event, Event | None, int]


def _threads(events: Iterable[Event]) -> list[tuple[int, int | None, list[Event]]]:
    """Return the events of each rank, and of each node's agent (None), in their order."""
    by_thread: dict[tuple[int, int | None], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.ts):
        by_thread[event.node, event.rank].append(event)
    agents_first = sorted(by_thread, key=lambda thread: (thread[0], -1 if thread[1] is None else thread[1]))
    return [(node, rank, by_thread[node, rank]) for node, rank in agents_first]


def _spans(events: Sequence[Event]) -> list[_Span]:
    """Match the begin and end events of a thread; what was interrupted lasts until the next event."""
    found: list[_Span] = []
    begun: dict[tuple[int, str, int], int] = {}
    for place, event in enumerate(events):
        key = (event.pid, event.stage, event.generation)
        if event.edge == "begin":
            begun[key] = len(found)
            found.append((event, None, events[min(place + 1, len(events) - 1)].ts))
        elif event.edge == "end" and key in begun:
            at = begun.pop(key)
            found[at] = (found[at][0], event, event.ts)
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
    for node in sorted({node for node, *_ in found}):
        meta.append(_meta("process_name", _FIRST_NODE_PID + node, 0, f"node {node}"))
        meta.append(_meta("process_sort_index", _FIRST_NODE_PID + node, 0, 1 + node))
    slices: list[dict[str, Any]] = []
    for tid, (node, rank, own) in enumerate(found, start=_FIRST_TID):
        pid = _FIRST_NODE_PID + node
        meta.append(_meta("thread_name", pid, tid, "agent" if rank is None else f"rank {rank}"))
        meta.append(_meta("thread_sort_index", pid, tid, -1 if rank is None else rank))
        slices += _nested(_spans(own), pid, tid, begin_ns)
        slices += [_instant(event, pid, tid, begin_ns) for event in own if event.edge == "point"]
    slices += _of_job(report, begin_ns)
    slices.sort(key=lambda each: (each["ts"], -each.get("dur", 0)))
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"run": report.run.path, "begin": utc(report.run.begin_ns)},
        "traceEvents": [*meta, *slices],
    }
    return json.dumps(json_safe(document), separators=(",", ":"), allow_nan=False)


def _nested(spans: Sequence[_Span], pid: int, tid: int, begin_ns: int) -> list[dict[str, Any]]:
    """Return the trace events of a thread's spans; spans may nest but not overlap otherwise, as viewers require."""
    made: list[dict[str, Any]] = []
    around: list[int] = []
    for number, (event, end, until_ns) in enumerate(spans):
        common = {"name": event.stage, "cat": "stage", "pid": pid, "tid": tid, "args": _about(event, end)}
        # This is an agent's span, on the thread of a rank whose processes change meanwhile.
        if event.stage == EventName.RESPAWN:
            for phase, ns in (("b", event.ts), ("e", until_ns)):
                own_id = {"local": f"{tid}.{number}"}  # local to this process, and shown with it
                made.append({**common, "ph": phase, "id2": own_id, "ts": _us(ns, begin_ns)})
            continue
        while around and around[-1] <= event.ts:
            around.pop()
        end_ns = max(event.ts, min([until_ns, *around[-1:]]))
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


def _about(event: Event, end: Event | None = None) -> dict[str, Any]:
    fields = {**event.fields, **({} if end is None else end.fields)}
    said = {key: value[:_LONGEST_TEXT] if isinstance(value, str) else value for key, value in fields.items()}
    said |= {"generation": event.generation, "incident": event.incident, "os_pid": event.pid}
    return {**said, "unfinished": True} if end is None and event.edge == "begin" else said


def _instant(event: Event, pid: int, tid: int, begin_ns: int) -> dict[str, Any]:
    return {
        "name": event.stage,
        "cat": "fault" if event.stage == EventName.FAULT_INJECTED else "moment",
        "ph": "i",
        "s": "t",
        "pid": pid,
        "tid": tid,
        "ts": _us(event.ts, begin_ns),
        "args": _about(event),
    }


def _meta(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    """Return the name of a process or thread, or its place among the others."""
    args = {"name" if isinstance(value, str) else "sort_index": value}
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _us(ns: int, begin_ns: int) -> float:
    return round((ns - begin_ns) / 1000, 3)
