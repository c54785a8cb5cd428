"""Incidents: what the events of a run say about each fault and everything that followed it."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from checkpointless.observability.telemetry.event_names import LIVING, PHASES, STAGES, EventName, Rung
from checkpointless.observability.telemetry.events import Event

_NS_PER_S = 1e9
_NOTICING, _CLEANING_UP = PHASES["notice"], PHASES["stop"]
#: Their reasons are why something was noticed or was not kept, and not why a recovery did not finish.
_WITH_OTHER_REASONS = frozenset({EventName.DETECT, EventName.WARM, EventName.DATASETS, EventName.INEXACT})
#: Stages that belong to the new generation; the earlier stages belong to the generation that ended.
_STARTING = frozenset(STAGES[STAGES.index(EventName.ENTER) :])


class Outcome(enum.Enum):
    """How an incident ended."""

    RESUMED = "resumed"  # every rank committed its first step of the new generation, or no step was left
    INEXACT = "resumed, not exact"  # the same, and a step that was made again was another one than before
    ESCALATED = "escalated"  # the next fault came before a step was made
    FAILED = "failed"  # the log ends before either


@dataclass(frozen=True)
class IncidentSummary:
    """Summary of one incident."""

    incident: str
    generation: int
    cause: str  # what went wrong, in one line ("" if not known)
    culprit: int | None  # rank that failed; None if no event names one
    how: str  # how the fault was detected ("" if not known)
    # start in UTC nanoseconds: when the fault happened if that is known, else the first event. A hang counts from
    # the last progress of the rank that hangs, a silent node from its last word
    start_ns: int
    # end in UTC nanoseconds: the end of the last rank's ``first_step``, as far as known; None unless training
    # resumed
    end_ns: int | None
    headline_s: float | None  # seconds from start to end; None unless training resumed
    # seconds that each stage took on its slowest rank, for the stages that happened, in order. ``detect`` lasts
    # from the fault, if it is known when that happened, to the first notice of it
    stages_s: Mapping[str, float] = field(default_factory=dict)
    # step after which training resumes; None if nothing was decided, or nothing had been committed
    target: int | None = None
    nbytes: int = 0
    sources: tuple[int, ...] = ()
    # ranks that were filled from copies, by the name of the tier that had them
    tiers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    respawned: tuple[int, ...] = ()
    rung: Rung = Rung.IN_PROCESS
    # reason for each recovery level above ``in-process`` that was needed, in the order of the levels
    steps_up: tuple[str, ...] = ()
    # seconds of the incident by stage, without overlap: a stage lasts from the end of the previous stage until the
    # last rank has finished it. They add up to ``headline_s`` if a step was left to train
    tiles_s: Mapping[str, float] = field(default_factory=dict)
    injected: str = ""  # spec of the injected fault ("" if none was injected)
    committed: int | None = None  # newest optimizer step that a rank had committed (0: none); None if not known
    resumed_after: int | None = None  # step after which training actually resumed; None if not known
    outcome: Outcome = Outcome.FAILED
    reason: str = ""  # why recovery was refused or broke off ("" if it was not)
    inexact: str = ""  # in what training is another one than before the fault ("" if it is not, as far as is known)
    who: str = ""  # name of what is at fault if that is no rank, such as ``node 1`` ("": not known, or a rank)
    node: int | None = None  # node of the rank that failed, as far as is known
    is_corrupted: bool = False  # whether a rank had computed a gradient wrongly

    @property
    def has_resumed(self) -> bool:
        """Whether training resumed after it."""
        return self.outcome in (Outcome.RESUMED, Outcome.INEXACT)

    @property
    def steps_lost(self) -> int | None:
        """The number of committed steps that had to be repeated; None if unknown or if training did not resume."""
        if not self.has_resumed or self.committed is None or self.resumed_after is None:
            return None
        return max(0, self.committed - self.resumed_after)

    @property
    def kind(self) -> str:
        """The kind of the fault: the kind in the injected fault's spec, else how the fault was detected."""
        return self.injected.partition("@")[0].partition(":")[0] or self.how.lower() or "unknown"

    @property
    def label(self) -> str:
        """Its cause in the sums of time: how it was noticed, except for a corrupted gradient."""
        return EventName.CORRUPTED.value if self.is_corrupted else self.how or "unknown"


def summarize(events: Iterable[Event]) -> list[IncidentSummary]:
    """Summarize each incident of a run, in the order in which the incidents began."""
    log = _Log(events)
    ended = [_generation(group) for group in log.groups.values()]
    return [
        _summary(incident, group, log, superseded=any(other > generation for other in ended))
        for (incident, group), generation in zip(log.groups.items(), ended, strict=True)
    ]


def gone_back(events: Iterable[Event]) -> frozenset[int]:
    """Return the committed steps that a run had to make again, because no living rank held the state after them."""
    steps: set[int] = set()
    for each in summarize(events):
        is_due = each.tiers or each.rung is Rung.JOB
        if is_due and each.committed is not None and each.resumed_after is not None:
            steps.update(range(each.resumed_after + 1, each.committed + 1))
    return frozenset(steps)


class _Log:
    """The events of a run, sorted by what they say about incidents."""

    def __init__(self, events: Iterable[Event]) -> None:
        in_order = sorted(events, key=lambda event: event.ts)
        detects = [event for event in in_order if event.stage == EventName.DETECT]
        ended_by = {event.generation: event.incident for event in detects if event.incident is not None}
        self.groups: dict[str, list[Event]] = defaultdict(list)
        self.injected: list[Event] = []
        self.first_steps: dict[int, int] = {}
        self.nodes: dict[tuple[int, int | None], int] = {}  # by generation and rank
        self.corrupted: set[int] = set()  # generations
        self.job_end: Event | None = None
        for event in in_order:
            if event.stage == EventName.FAULT_INJECTED:
                self.injected.append(event)
                continue
            if event.stage == EventName.JOB:
                self.job_end = event if event.edge == "end" else self.job_end
                continue
            if event.stage == EventName.CORRUPTED and event.fields.get("redone"):
                self.corrupted.add(event.generation)
            if event.stage in _STARTING:
                self.nodes[event.generation, event.rank] = event.node
            step = event.fields.get("step")
            if event.stage == EventName.FIRST_STEP and event.edge == "end" and isinstance(step, int):
                self.first_steps[event.generation] = max(step, self.first_steps.get(event.generation, step))
            named = event.incident
            # A rank begins to clean up before the agent has told it the incident's id.
            incident = ended_by.get(event.generation, named) if event.stage in _CLEANING_UP else named
            if incident is not None:
                self.groups[incident].append(event)


def _summary(incident: str, events: Sequence[Event], log: _Log, superseded: bool) -> IncidentSummary:
    job_end = log.job_end
    generation = _generation(events)
    about = _detection(events).fields
    culprit = about["culprit"] if isinstance(about.get("culprit"), int) else None
    noticed = next((event for event in events if event.stage in _NOTICING), events[0])
    injected = _fault_behind(log.injected, generation, culprit, noticed.ts)
    fault_ns = _fault_ns(events, injected)
    start_ns = events[0].ts if fault_ns is None else fault_ns

    spans = _spans(events)
    ended_well = not superseded and job_end is not None and job_end.fields.get("code") == 0
    end = _end(events, generation, ended_well)
    stages_s = {stage: max(spans[stage].values()) for stage in STAGES if spans.get(stage)}
    if fault_ns is not None:
        stages_s[EventName.DETECT] = max(0.0, (noticed.ts - fault_ns) / _NS_PER_S)

    ends = [event for event in events if event.edge == "end"]
    targets = [event.fields.get("target") for event in ends if event.stage == EventName.DECIDE]
    target = next((target for target in targets if isinstance(target, int)), None)
    ups = _steps_up(events)
    fills = [event for event in ends if event.stage == EventName.TRANSFER and _ranks(event.fields.get("sources"))]
    inexact = _inexact(events)
    if end is not None:
        outcome = Outcome.INEXACT if inexact else Outcome.RESUMED
    else:
        outcome = Outcome.ESCALATED if superseded else Outcome.FAILED
    return IncidentSummary(
        incident=incident,
        generation=generation,
        cause=str(about.get("cause") or ""),
        culprit=culprit,
        how=str(about.get("how") or ""),
        start_ns=start_ns,
        end_ns=None if end is None else end.ts,
        headline_s=None if end is None else max(0.0, (end.ts - start_ns) / _NS_PER_S),
        stages_s={stage: stages_s[stage] for stage in STAGES if stage in stages_s},
        target=target,
        nbytes=sum(_whole(event.fields.get("bytes")) for event in fills),
        sources=tuple(sorted({rank for event in fills for rank in _ranks(event.fields["sources"])})),
        tiers=_tiers(ends),
        respawned=tuple(sorted({e.rank for e in events if e.stage == EventName.RESPAWN and e.rank is not None})),
        rung=max(ups, default=Rung.IN_PROCESS),
        steps_up=tuple(why for _, why in sorted(ups.items())),
        tiles_s=_tiles(events, start_ns, None if fault_ns is None else noticed.ts, end),
        injected="" if injected is None else str(injected.fields.get("spec") or ""),
        committed=_committed(events, generation, log.first_steps),
        resumed_after=_resumed_after(events, generation, target),
        outcome=outcome,
        reason="" if end is not None else _reason(events, None if superseded else job_end),
        inexact=inexact,
        who=str(about.get("who") or ""),
        node=log.nodes.get((generation, culprit)),
        is_corrupted=generation in log.corrupted,
    )


def _inexact(events: Sequence[Event]) -> str:
    """Return in what a redone step is another one, as the first of the ranks says."""
    said = {event.rank: event.fields.get("reason") for event in events if event.stage == EventName.INEXACT}
    return next((f"rank {rank}: {why or 'another step'}" for rank, why in said.items()), "")


def _tiers(ends: Sequence[Event]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that were filled from copies, by tier; the newest word of each rank counts."""
    tier_of = {
        event.rank: str(event.fields["tier"])
        for event in ends
        if event.stage == EventName.COPIES and event.rank is not None and "tier" in event.fields
    }
    named = sorted(set(tier_of.values()) - {LIVING})
    return {tier: tuple(sorted(rank for rank, each in tier_of.items() if each == tier)) for tier in named}


def _detection(events: Sequence[Event]) -> Event:
    """Return the most informative ``detect`` event: the last that is not a victim's; victims often report first.

    A victim's is an exception without a culprit; the loss of a node does not count.
    """
    told = [event for event in events if event.stage == EventName.DETECT] or events[:1]
    others = [e for e in told if e.fields.get("how") != "exception" or isinstance(e.fields.get("culprit"), int)]
    return (others or told)[-1]


def _generation(events: Sequence[Event]) -> int:
    """Return the generation that an incident ended: its detection's, else the oldest that its events carry."""
    detects = [event.generation for event in events if event.stage == EventName.DETECT]
    return detects[0] if detects else min(event.generation for event in events)


def _fault_behind(injected: Sequence[Event], generation: int, culprit: int | None, before_ns: int) -> Event | None:
    """Return the last injected fault that can have caused what was detected at ``before_ns``; None without one."""
    candidates = [
        event
        for event in injected
        if event.generation == generation
        and event.ts <= before_ns
        and (culprit is None or event.rank is None or event.rank == culprit)
    ]
    return candidates[-1] if candidates else None


def _fault_ns(events: Iterable[Event], injected: Event | None) -> int | None:
    """Return when the fault happened, as far as known: whoever detects one says for how long it went undetected."""
    known = [] if injected is None else [injected.ts]
    for event in events:
        undetected_s = event.fields.get("undetected_s")
        if event.stage == EventName.DETECT and isinstance(undetected_s, int | float):
            known.append(event.ts - round(undetected_s * _NS_PER_S))
    return min(known, default=None)


def _spans(events: Iterable[Event]) -> dict[str, dict[int | None, float]]:
    """Return the seconds of the finished spans of each stage, by rank; several spans of one rank add up."""
    open_since: dict[tuple[int, int | None, str, int], Event] = {}
    spent: dict[str, dict[int | None, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        key = (event.pid, event.rank, event.stage, event.generation)
        if event.edge == "begin":
            open_since[key] = event
        elif event.edge == "end" and key in open_since:
            spent[event.stage][event.rank] += max(0.0, (event.ts - open_since.pop(key).ts) / _NS_PER_S)
    return spent


def _end(events: Sequence[Event], generation: int, ended_well: bool) -> Event | None:
    """Return the event with which an incident was over: the end of the last rank's ``first_step``, or the
    coordinator's word that it was made (``recovered``). If no step was left and the job ended well, the last event
    counts; if ranks write none of the new generation (the block is no loop that we know), ``go`` does.
    """
    ranks = {
        event.rank
        for event in events
        if event.generation > generation and event.rank is not None and event.stage in _STARTING
    }
    if not ranks:
        return next((event for event in events if event.stage == EventName.GO), None) if ended_well else None
    committed = {
        event.rank: event
        for event in events
        if event.stage == EventName.FIRST_STEP and event.edge == "end" and "error" not in event.fields
    }
    if not ranks <= committed.keys():
        made = (event for event in events if event.stage == EventName.RECOVERED)
        known = next((event for event in made if isinstance(event.fields.get("step"), int)), None)
        others = (event for event in reversed(events) if event.stage != EventName.RECOVERED)
        return known or (next(others) if ended_well else None)
    return max(committed.values(), key=lambda event: event.ts)


def _tiles(events: Sequence[Event], start_ns: int, noticed_ns: int | None, end: Event | None) -> dict[str, float]:
    """Divide the time of an incident at the times at which the last rank ended each stage."""
    ended_ns: dict[str, int] = {}
    for event in events:
        is_go = event.stage == EventName.GO
        stage = EventName.BARRIER if is_go else event.stage  # no rank has passed the barrier before
        if event.edge == "end" or is_go:
            ended_ns[stage] = max(event.ts, ended_ns.get(stage, 0))
    if end is not None and end.stage == EventName.RECOVERED:
        ended_ns[EventName.FIRST_STEP] = end.ts
    if noticed_ns is not None:
        ended_ns[EventName.DETECT] = noticed_ns
    tiles: dict[str, float] = {}
    reached_ns = start_ns
    for stage in STAGES:
        until_ns = ended_ns.get(stage, 0) if end is None else min(ended_ns.get(stage, 0), end.ts)
        if until_ns > reached_ns:
            tiles[stage] = (until_ns - reached_ns) / _NS_PER_S
            reached_ns = until_ns
    return tiles


def _committed(events: Sequence[Event], generation: int, first_steps: Mapping[int, int]) -> int | None:
    """Return the newest step committed before: as seen by the agents or written by the ended generation's ranks."""
    seen = [event.fields.get("high_water") for event in events if event.stage == EventName.GO]
    known = [step for step in (*seen, first_steps.get(generation)) if isinstance(step, int)]
    return max(0, *known) if known else None


def _resumed_after(events: Sequence[Event], generation: int, target: int | None) -> int | None:
    """Return the step before the new generation's first one; without a first step, the step that was decided."""
    made = [
        event.fields["step"]
        for event in events
        if event.stage == EventName.FIRST_STEP
        and event.edge == "end"
        and event.generation > generation
        and isinstance(event.fields.get("step"), int)
    ]
    return min(made) - 1 if made else target


def _reason(events: Sequence[Event], job_end: Event | None) -> str:
    """Return why recovery did not finish: the reason in the job's end, else in the last event that gives one."""
    for event in (*([job_end] if job_end is not None else []), *reversed(events)):
        said = event.fields.get("reason") or event.fields.get("error")
        if isinstance(said, list):
            said = next(iter(said), "")
        if str(said or "").startswith("RankShouldRestart"):
            continue  # a rank that was told to leave does not know why
        if said and event.edge != "begin" and event.stage not in _WITH_OTHER_REASONS:
            return str(said)
    return ""


def _ranks(value: object) -> tuple[int, ...]:
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list | tuple) else ()


def _steps_up(events: Sequence[Event]) -> dict[Rung, str]:
    """Return why each recovery level was needed; of storage, ranks know it better than an agent."""
    by_label = {rung.label: rung for rung in Rung}
    ups: dict[Rung, str] = {}
    for event in events:
        if event.stage == EventName.RUNG and event.fields.get("rung") in by_label:
            ups.setdefault(by_label[event.fields["rung"]], str(event.fields.get("why")))
    for event in events:
        if event.stage == EventName.FALLBACK:
            ups[Rung.JOB] = str(event.fields.get("reason"))
    return ups


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
