"""Incidents: what the events of a run say about each fault and all that followed it."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from checkpointless.telemetry.events import FAULT_INJECTED, STAGES, Event

_NS_PER_S = 1e9
_NOTICING = frozenset({"detect", "notify"})
_CLEANING_UP = frozenset({"abort", "finalize", "health"})
#: Stages of the new generation; the earlier ones belong to the one that ended.
_STARTING = frozenset(STAGES[STAGES.index("init") :])
JOB = "job"
RUNG = "rung"


class Outcome(enum.Enum):
    """How an incident ended."""

    RESUMED = "resumed"  # every rank committed its first step of the new generation, or none was left to make
    ESCALATED = "escalated"  # another incident took over before that
    FAILED = "failed"  # the log ends before that


class Rung(enum.IntEnum):
    """How far up a recovery goes."""

    IN_PROCESS = 0  # the block is run again in the living process
    PROCESS = 1  # a rank gets a new one
    NODE = 2  # another node takes a lost one's place
    JOB = 3  # all ranks start again from storage

    @property
    def label(self) -> str:
        """Its name in events and tables."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class IncidentSummary:
    """One incident.

    Attributes:
        incident: its id.
        generation: the generation that it ended.
        cause: what went wrong, in one line ("" if no event says so).
        culprit: the rank that failed, or None.
        how: how it was detected ("" if no event says so).
        start_ns: UTC nanoseconds: the injected fault where it is known, else the first event.
        end_ns: UTC nanoseconds: the end of the last rank's ``first_step``, as far as known; None unless resumed.
        headline_s: seconds from start to end; None unless resumed.
        stages_s: seconds of each stage that happened, in order: of the rank that took longest. ``detect`` runs from
            the injected fault to the first notice of it.
        target: the step after which training resumes; None if nothing was decided, or nothing committed before.
        nbytes: bytes received by the ranks that were filled.
        sources: the ranks that they came from.
        peak_growth_bytes: how much more host memory than at the fault a rank that lived through it held at the most
            until its state was back; None if nobody said.
        respawned: the ranks that got a new process.
        rung: how far up the recovery went.
        steps_up: why it went higher than a block that is run again in the living process, rung by rung.
        tiles_s: seconds of the incident by stage, without overlap: a stage lasts from the end of the one before
            until its last rank has ended it. They add up to the headline if a step was left to make.
        injected: the spec of the fault that was caused on purpose ("" if none was).
        committed: the newest optimizer step that a rank had committed (0: none); None if no event says so.
        resumed_after: the step after which training really went on; None if no event says so.
        outcome: how it ended.
        reason: why recovery was refused or broke off ("" if it was not).
    """

    incident: str
    generation: int
    cause: str
    culprit: int | None
    how: str
    start_ns: int
    end_ns: int | None
    headline_s: float | None
    stages_s: Mapping[str, float] = field(default_factory=dict)
    target: int | None = None
    nbytes: int = 0
    sources: tuple[int, ...] = ()
    peak_growth_bytes: int | None = None
    respawned: tuple[int, ...] = ()
    rung: Rung = Rung.IN_PROCESS
    steps_up: tuple[str, ...] = ()
    tiles_s: Mapping[str, float] = field(default_factory=dict)
    injected: str = ""
    committed: int | None = None
    resumed_after: int | None = None
    outcome: Outcome = Outcome.FAILED
    reason: str = ""

    @property
    def steps_lost(self) -> int | None:
        """How many committed steps had to be made again; None if that is not known, or nothing was resumed."""
        if self.outcome is not Outcome.RESUMED or self.committed is None or self.resumed_after is None:
            return None
        return max(0, self.committed - self.resumed_after)

    @property
    def kind(self) -> str:
        """What kind of fault it was: as the injected fault's spec says, else how it was noticed."""
        return self.injected.partition("@")[0].partition(":")[0] or self.how.lower() or "unknown"

    @property
    def sentence(self) -> str:
        """The incident in one line."""
        what = f"generation {self.generation}: {self.cause or 'unknown cause'}"
        if self.outcome is Outcome.RESUMED:
            after = "" if self.target is None else f" after step {self.target}"
            return f"{what}; resumed{after} in {self.headline_s:.2f} s"
        return f"{what}; {self.outcome.value}" + (f": {self.reason}" if self.reason else "")


def summarize(events: Iterable[Event]) -> list[IncidentSummary]:
    """Sum up each incident of a run, in the order in which they began.

    Times are differences of the monotonic clock, except between events of different nodes, where only UTC compares.

    Args:
        events: all events of the run, in any order.
    """
    log = _Log(events)
    ended = [_generation(group) for group in log.groups.values()]
    return [
        _summary(incident, group, log, superseded=any(other > generation for other in ended))
        for (incident, group), generation in zip(log.groups.items(), ended, strict=True)
    ]


def by_incident(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each incident, by time; the incidents in the order in which they began.

    Args:
        events: all events of the run, in any order.
    """
    return _Log(events).groups


class _Log:
    """The events of a run, sorted by what they say of incidents.

    Attributes:
        groups: the events of each incident, by time.
        injected: the faults that were caused on purpose.
        first_steps: the step with which training began, by generation.
        job_end: the end of the job, if it has come.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        in_order = sorted(events, key=lambda event: event.ts)
        ended_by = {e.generation: e.incident for e in in_order if e.stage == "detect" and e.incident is not None}
        self.groups: dict[str, list[Event]] = defaultdict(list)
        self.injected: list[Event] = []
        self.first_steps: dict[int, int] = {}
        self.job_end: Event | None = None
        for event in in_order:
            if event.stage == FAULT_INJECTED:
                self.injected.append(event)
                continue
            if event.stage == JOB:
                self.job_end = event if event.edge == "end" else self.job_end
                continue
            step = event.fields.get("step")
            if event.stage == "first_step" and event.edge == "end" and isinstance(step, int):
                self.first_steps[event.generation] = max(step, self.first_steps.get(event.generation, step))
            named = event.incident
            # A rank begins to clean up before the agent has told it the incident's name.
            incident = ended_by.get(event.generation, named) if event.stage in _CLEANING_UP else named
            if incident is not None:
                self.groups[incident].append(event)


def _summary(incident: str, events: Sequence[Event], log: _Log, superseded: bool) -> IncidentSummary:
    job_end = log.job_end
    generation = _generation(events)
    about = _detection(events).fields
    culprit = about["culprit"] if isinstance(about.get("culprit"), int) else None
    noticed = next((event for event in events if event.stage in _NOTICING), events[0])
    fault = _fault_behind(log.injected, generation, culprit, noticed.ts)
    start = fault or events[0]

    spans = _spans(events)
    end = _end(events, generation)
    if end is None and not superseded and job_end is not None and job_end.fields.get("code") == 0:
        end = events[-1]  # there was no step left to make
    stages_s = {stage: max(spans[stage].values()) for stage in STAGES if spans.get(stage)}
    if fault is not None:
        stages_s["detect"] = _seconds(fault, noticed)

    ends = [event for event in events if event.edge == "end"]
    targets = [event.fields.get("target") for event in ends if event.stage == "decide"]
    target = next((target for target in targets if isinstance(target, int)), None)
    ups = _steps_up(events)
    fills = [event for event in ends if event.stage == "transfer" and _ranks(event.fields.get("sources"))]
    if end is not None:
        outcome = Outcome.RESUMED
    else:
        outcome = Outcome.ESCALATED if superseded else Outcome.FAILED
    return IncidentSummary(
        incident=incident,
        generation=generation,
        cause=str(about.get("cause") or ""),
        culprit=culprit,
        how=str(about.get("how") or ""),
        start_ns=start.ts,
        end_ns=None if end is None else end.ts,
        headline_s=None if end is None else _seconds(start, end),
        stages_s={stage: stages_s[stage] for stage in STAGES if stage in stages_s},
        target=target,
        nbytes=sum(_whole(event.fields.get("bytes")) for event in fills),
        peak_growth_bytes=max(
            (_whole(event.fields["peak_growth_bytes"]) for event in ends if "peak_growth_bytes" in event.fields),
            default=None,
        ),
        sources=tuple(sorted({rank for event in fills for rank in _ranks(event.fields["sources"])})),
        respawned=tuple(sorted({e.rank for e in events if e.stage == "respawn" and e.rank is not None})),
        rung=max(ups, default=Rung.IN_PROCESS),
        steps_up=tuple(why for _, why in sorted(ups.items())),
        tiles_s=_tiles(events, start.ts, noticed.ts if fault is not None else None, end),
        injected="" if fault is None else str(fault.fields.get("spec") or ""),
        committed=_committed(events, generation, log.first_steps),
        resumed_after=_resumed_after(events, generation, target),
        outcome=outcome,
        reason="" if end is not None else _reason(events, None if superseded else job_end),
    )


def _detection(events: Sequence[Event]) -> Event:
    """The one that knows best: the last, since victims are often heard first, that is no victim."""
    told = [event for event in events if event.stage == "detect"] or events[:1]
    return ([event for event in told if not _tells_of_a_victim(event)] or told)[-1]


def _tells_of_a_victim(detect: Event) -> bool:
    """An exception for which nobody is blamed; for the loss of a node nobody is, either."""
    return detect.fields.get("how") == "exception" and not isinstance(detect.fields.get("culprit"), int)


def _generation(events: Sequence[Event]) -> int:
    """The generation that an incident ended: the detection's, else the oldest that any event of it carries."""
    detects = [event.generation for event in events if event.stage == "detect"]
    return detects[0] if detects else min(event.generation for event in events)


def _fault_behind(injected: Sequence[Event], generation: int, culprit: int | None, before_ns: int) -> Event | None:
    """The last injected fault that can have caused what was detected at ``before_ns``."""
    candidates = [
        event
        for event in injected
        if event.generation == generation
        and event.ts <= before_ns
        and (culprit is None or event.rank is None or event.rank == culprit)
    ]
    return candidates[-1] if candidates else None


def _spans(events: Iterable[Event]) -> dict[str, dict[int | None, float]]:
    """Seconds spent in the finished spans of each stage, by rank; several spans of a rank add up."""
    open_since: dict[tuple[int, int | None, str, int], Event] = {}
    spent: dict[str, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        key = (event.pid, event.rank, event.stage, event.generation)
        if event.edge == "begin":
            open_since[key] = event
        elif event.edge == "end" and key in open_since:
            spent[event.stage][event.rank] += _seconds(open_since.pop(key), event)
    return spent


def _end(events: Sequence[Event], generation: int) -> Event | None:
    """The end of the last rank's ``first_step``, if every rank of the new generation came to it.

    A rank whose next fault comes right after the commit may not have written it: then the coordinator, which reads
    the ranks' boards, knows that the step was made (``recovered``).

    Where ranks write nothing of the new generation (a block that is no training loop we know), it ends with the
    agent's ``go``.
    """
    ranks = {
        event.rank
        for event in events
        if event.generation > generation and event.rank is not None and event.stage in _STARTING
    }
    if not ranks:
        return next((event for event in events if event.stage == "go"), None)
    committed = {
        event.rank: event
        for event in events
        if event.stage == "first_step" and event.edge == "end" and "error" not in event.fields
    }
    if not ranks <= committed.keys():
        made = (event for event in events if event.stage == "recovered")
        return next((event for event in made if isinstance(event.fields.get("step"), int)), None)
    return max(committed.values(), key=lambda event: event.ts)


def _tiles(events: Sequence[Event], start_ns: int, noticed_ns: int | None, end: Event | None) -> dict[str, float]:
    """The time of an incident, cut at the moments at which the last rank ended each stage.

    By UTC, since the last rank may be on any node.
    """
    ended_ns: dict[str, int] = {}
    for event in events:
        stage = "barrier" if event.stage == "go" else event.stage  # nobody is past it before that
        if event.edge == "end" or event.stage == "go":
            ended_ns[stage] = max(event.ts, ended_ns.get(stage, 0))
    if end is not None and end.stage == "recovered":
        ended_ns["first_step"] = end.ts
    if noticed_ns is not None:
        ended_ns["detect"] = noticed_ns
    tiles: dict[str, float] = {}
    reached_ns = start_ns
    for stage in STAGES:
        until_ns = ended_ns.get(stage, 0) if end is None else min(ended_ns.get(stage, 0), end.ts)
        if until_ns > reached_ns:
            tiles[stage] = (until_ns - reached_ns) / _NS_PER_S
            reached_ns = until_ns
    return tiles


def _committed(events: Sequence[Event], generation: int, first_steps: Mapping[int, int]) -> int | None:
    """The newest step committed before: as the agents saw it, and as the ended generation's ranks wrote it."""
    seen = [event.fields.get("high_water") for event in events if event.stage == "go"]
    known = [step for step in (*seen, first_steps.get(generation)) if isinstance(step, int)]
    return max(0, *known) if known else None


def _resumed_after(events: Sequence[Event], generation: int, target: int | None) -> int | None:
    """The step before the first one of the new generation; without such a step, the one that was decided."""
    made = [
        event.fields["step"]
        for event in events
        if event.stage == "first_step"
        and event.edge == "end"
        and event.generation > generation
        and isinstance(event.fields.get("step"), int)
    ]
    return min(made) - 1 if made else target


def _reason(events: Sequence[Event], job_end: Event | None) -> str:
    """Why recovery did not come to its end: the job's last words, else those of the last event that has any."""
    for event in (*([job_end] if job_end is not None else []), *reversed(events)):
        said = event.fields.get("reason") or event.fields.get("error")
        if isinstance(said, list):
            said = next(iter(said), "")
        if str(said or "").startswith("RankShouldRestart"):
            continue  # a rank that was told to leave has nothing to say of why
        if said and event.edge != "begin" and event.stage != "detect":
            return str(said)
    return ""


def _seconds(begin: Event, end: Event) -> float:
    elapsed_ns = end.mono - begin.mono if begin.node == end.node else end.ts - begin.ts
    return max(0.0, elapsed_ns / _NS_PER_S)


def _ranks(value: object) -> tuple[int, ...]:
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list | tuple) else ()


def _steps_up(events: Sequence[Event]) -> dict[Rung, str]:
    """Why each rung was needed. Ranks that load from storage know it better than an agent that sees it later."""
    by_label = {rung.label: rung for rung in Rung}
    ups: dict[Rung, str] = {}
    for event in events:
        if event.stage == RUNG and event.fields.get("rung") in by_label:
            ups.setdefault(by_label[event.fields["rung"]], str(event.fields.get("why")))
    for event in events:
        if event.stage == "fallback":
            ups[Rung.JOB] = str(event.fields.get("reason"))
    return ups


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
