"""The metrics in Prometheus's text format: what events count, and what the snapshot of a loop and the report say.

The labels ``job``, ``run`` and ``node`` say whose a sample is wherever it is scraped: those that Prometheus adds
name an address, which belongs to another job tomorrow.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from checkpointless.faults.spec import FaultKind
from checkpointless.launcher.protocol.messages import RankState
from checkpointless.observability.report.goodput import CAUSES
from checkpointless.observability.report.summary import Report, build_report
from checkpointless.observability.telemetry.event_names import PHASES, STAGES, EventName, Rung
from checkpointless.observability.telemetry.events import Event, LineTail

OUTSIDE = -1  # in place of a node's number: a coordinator in a separate process is no node
STALE_S = 5.0  # a loop that has not turned for this long counts as stuck


@dataclass(frozen=True)
class RankStatus:
    """A rank of this node, as its board shows it; ``beat_age_s`` is None while it is not in its block."""

    rank: int
    state: str
    pid: int | None
    incarnation: int
    committed: int | None
    making: int | None
    beat_age_s: float | None


@dataclass(frozen=True)
class JobStatus:
    """The whole job, which only the coordinator knows; a ``loading`` node has no ranks yet."""

    nodes: Sequence[Mapping[str, Any]]  # Any: plain JSON, as ``/status`` shows it
    ranks: Sequence[Mapping[str, Any]]  # the ``rank``, its ``node``, ``state`` and ``incarnation``
    spares: int
    incidents: int
    cause: str | None  # how the cause of the incident in progress came about: ``exception``, ``hang``, ``SIGKILL``
    inexact: int = 0  # after how many incidents the job resumed, and was another one


@dataclass(frozen=True)
class Snapshot:
    """One look at this node's part of the job; None for what is not known yet."""

    node: int  # number of the node; :data:`OUTSIDE` for a coordinator in a separate process
    at_s: float = 0.0  # when the look was taken, in seconds since the epoch
    looked_at_s: float | None = None  # the same on the monotonic clock (None: the agent has not joined the job)
    generation: int | None = None
    high_water: int | None = None  # the highest committed step that this node knows of
    incident: str | None = None  # the incident that the ranks are being brought together for (None: none)
    exit_code: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    job: JobStatus | None = None  # the whole job; None where the coordinator does not run

    def health(self, now_s: float) -> tuple[bool, str]:
        """Return whether the loop turns and the job goes on, and that as a short text."""
        if self.looked_at_s is None:
            return False, "the agent has not joined the job yet"
        if self.exit_code is not None:
            return False, f"the job is over with exit code {self.exit_code}"
        age_s = now_s - self.looked_at_s
        if age_s > STALE_S:
            return False, f"the loop has not turned for {age_s:.1f} s"
        if self.incident is not None:
            return True, f"ok, recovering from incident {self.incident}"
        return True, "ok" if self.generation is not None else "ok, waiting for all ranks"


logger = logging.getLogger(__name__)

MAX_EVENTS = 50_000  # about 50 MB; a log with more has no account
ASKED_FOR_S = 300.0  # how long reading continues after a request
_MAX_BYTES = 4 * 1024 * 1024  # that are read at once
_EVERY_S = 1.0
_CLOSE_TIMEOUT_S = 1.0
_SHARE = 20  # an account is made in at most a twentieth of the time


class RunLog:
    """Reads an event log in a thread, once per second, for :data:`ASKED_FOR_S` after each question.

    ``take`` gets each event of the node's ``ranks`` that was written since this object was made.
    """

    def __init__(
        self, path: Path, node: int, ranks: Callable[[], frozenset[int]], take: Callable[[Event], None]
    ) -> None:
        self._tail = LineTail(path, max_bytes=_MAX_BYTES, from_start=True)
        self._run_dir, self._node, self._ranks, self._take = str(path.parent), node, ranks, take
        self._began_ns = time.time_ns()
        self._events: list[Event] = []
        self._is_new, self._has_account = False, True
        self._again_at_s, self._asked_at_s = 0.0, -math.inf
        self._newest = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._nothing = self.report = build_report(self._run_dir, [])

    def ask(self, high_water: int | None, has_account: bool = True) -> Report:
        """Return at once what is known, and keep it up to date for a while; one thread at a time may call this."""
        self._asked_at_s = time.monotonic()
        self._has_account &= has_account
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._read, name="checkpointless-run-log", daemon=True)
            self._thread.start()
        run = self.report.run
        self._newest = max(self._newest, high_water or 0, run.last_step or 0)  # never less: it is counted
        return replace(self.report, run=replace(run, last_step=self._newest))

    def look(self, now_s: float) -> None:
        """Read the lines that were appended, and make the account if that is due."""
        began_s, ranks = time.perf_counter(), self._ranks()
        for line in self._tail.lines():
            event = Event.parse(line)
            if event is None:
                continue
            is_own = event.node == self._node if event.rank is None else event.rank in ranks
            if is_own and event.ts >= self._began_ns:
                self._take(event)
            self._events.append(event)
            self._is_new = True
        if len(self._events) > MAX_EVENTS and self._has_account:
            logger.warning("the event log has over %d events: the metrics have no account any more", MAX_EVENTS)
            self._has_account = False
        if not self._has_account:
            self._is_new, self._events, self.report = False, [], self._nothing
        elif self._is_new and now_s >= self._again_at_s:
            self.report, self._is_new = build_report(self._run_dir, self._events), False
            self._again_at_s = now_s + _SHARE * (time.perf_counter() - began_s)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)  # not forever: the disk may not answer

    def _read(self) -> None:
        try:
            while True:
                now_s = time.monotonic()
                if now_s - self._asked_at_s <= ASKED_FOR_S:
                    self.look(now_s)
                if self._closing.wait(_EVERY_S):
                    return
        except Exception:
            logger.exception("the event log is read no more: the metrics that come from it stay as they are")


RECOVERY_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STAGE_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
#: ``detect`` is measured between processes, and only for a fault that was injected.
MEASURED_STAGES = (EventName.RESPAWN, *(stage for stage in STAGES if stage != EventName.DETECT))
_CAUSES = ("SIGKILL", "exception", "exit", "hang", "node", "replace")  # always present, so that rates see the first
_KINDS = tuple(kind.value for kind in FaultKind)
_OTHER = "other"
_NODE_STATES = ("absent", "joined", "loading")
_RANK_STATES = tuple(state.value for state in RankState)
_Fields = Mapping[str, Any]  # Any: what an event's fields are


class Source(Enum):
    """Where events are counted."""

    AGENT = "events of a node's agent"
    COORDINATOR = "events of the coordinator"
    RANKS = "events of a node's ranks, which are read from the event log"


@dataclass(frozen=True)
class _EventMetric:
    """A counter or a histogram that is filled from events."""

    name: str  # its name, without ``checkpointless_`` before it and ``_total`` after it
    source: Source
    help: str
    stages: tuple[EventName, ...]
    edge: str | None = None  # the edge that counts; None: all
    # returns what an event adds, or the duration in it; None: nothing
    amount: Callable[[_Fields], float | None] = lambda _: 1
    label: str = ""  # the field that is its label
    values: tuple[str, ...] = ()  # values of the label that are there from the start
    buckets: tuple[float, ...] = ()  # the bounds of a histogram; empty for a counter


EVENT_METRICS = (
    _EventMetric(
        "respawns",
        Source.AGENT,
        "Processes started on this node in place of dead ones.",
        (EventName.RESPAWN,),
        "begin",
    ),
    _EventMetric(
        "device_checks_failed",
        Source.AGENT,
        "Device checks that failed on this node.",
        (EventName.DEVICE_CHECK,),
        amount=lambda fields: bool(fields.get("why")),
    ),
    _EventMetric(
        "incidents",
        Source.COORDINATOR,
        "Incidents that all ranks have met again after.",
        (EventName.GO,),
        amount=lambda fields: None if fields["cause"] is None else 1,
        label="cause",
        values=_CAUSES,
    ),
    _EventMetric(
        "recovery_seconds",
        Source.COORDINATOR,
        "From a fault until the step was made.",
        (EventName.RECOVERED,),
        amount=lambda fields: fields.get("seconds"),
        label="rung",
        values=tuple(rung.label for rung in Rung),
        buckets=RECOVERY_BUCKETS_S,
    ),
    _EventMetric(
        "steps_lost",
        Source.COORDINATOR,
        "Committed steps that storage lost.",
        (EventName.RECOVERED,),
        amount=lambda fields: fields.get("steps_lost"),
    ),
    _EventMetric(
        "nodes_given_up",
        Source.COORDINATOR,
        "Nodes given up because of a device.",
        (EventName.BAD_DEVICE,),
        amount=lambda fields: fields.get("remedy") == "give_up",
    ),
    _EventMetric(
        "stragglers",
        Source.COORDINATOR,
        "Ranks that were found to be slow.",
        (EventName.STRAGGLER,),
        "begin",
        label="why",
        values=("compute", "data"),
    ),
    _EventMetric(
        "stage_seconds",
        Source.RANKS,
        "How long a stage of an incident took a rank of this node.",
        MEASURED_STAGES,
        "end",
        amount=lambda fields: None if "error" in fields or not _of_incident(fields) else fields.get("seconds"),
        label="stage",
        values=MEASURED_STAGES,
        buckets=STAGE_BUCKETS_S,
    ),
    _EventMetric(
        "transfer_bytes",
        Source.RANKS,
        "Bytes that ranks of this node received from living replicas.",
        (EventName.TRANSFER,),
        "end",
        amount=lambda fields: fields.get("bytes") if _of_incident(fields) else None,
    ),
    _EventMetric(
        "faults_injected",
        Source.RANKS,
        "Faults caused on purpose in ranks of this node.",
        (EventName.FAULT_INJECTED,),
        label="kind",
        values=_KINDS,
    ),
    _EventMetric(
        "corrupted_gradients",
        Source.RANKS,
        "Gradients that a rank of this node has computed wrongly, found before the update.",
        (EventName.CORRUPTED,),
    ),
    _EventMetric(
        "inexact_incidents",
        Source.RANKS,
        "Incidents after which a rank of this node no longer computed what an undisturbed run computes.",
        (EventName.INEXACT,),
        amount=lambda fields: fields["is_first"],
    ),
)


def _of_incident(fields: _Fields) -> bool:
    return fields["incident"] is not None or fields["stage"] in PHASES["stop"]  # which may not know its name yet


def _kind(spec: str) -> str:
    kind = spec.partition("@")[0].partition(":")[0]
    return kind if kind in _KINDS else _OTHER


class Metrics:
    """Counts events, and makes the page; ``open`` is how incidents came about whose ranks have not met again."""

    def __init__(self, node: int, job: str = "", run_dir: str = "", script: str = "") -> None:
        prometheus_client.disable_created_metrics()
        self.open: dict[str, str] = {}
        self.incidents = 0
        self._about = {"version": version("checkpointless"), "script": script, "run_dir": run_dir}
        whose = {"job": job, "run": Path(run_dir).name, "node": "coordinator" if node == OUTSIDE else str(node)}
        self._whose = {name: value for name, value in whose.items() if value}
        self._inexact: set[int] = set()  # generations
        self._registries = {source: CollectorRegistry() for source in Source}
        self._counted = {metric.name: self._made(metric) for metric in EVENT_METRICS}

    def _made(self, metric: _EventMetric) -> Any:  # Any: a Counter or a Histogram of prometheus_client
        kind: Any = prometheus_client.Counter
        if metric.buckets:
            kind = functools.partial(prometheus_client.Histogram, buckets=metric.buckets)
        labels, registry = [*self._whose, *filter(None, [metric.label])], self._registries[metric.source]
        made = kind(f"checkpointless_{metric.name}", metric.help, labels, registry=registry)
        for value in metric.values if metric.label else ("",):
            self._labelled(made, metric, value)
        return made

    def _labelled(self, made: Any, metric: _EventMetric, value: str) -> Any:
        labels = self._whose | ({metric.label: str(value)} if metric.label else {})
        return made.labels(**labels) if labels else made

    def take(self, sources: Iterable[Source], record: _Fields) -> None:
        """Count an event; of several ``detect`` events of an incident, the last knows best how it came about."""
        stage, incident, known = record["stage"], record["incident"], dict(record)
        if stage == EventName.DETECT and incident is not None and Source.COORDINATOR in sources:
            self.incidents += incident not in self.open
            self.open[incident] = str(record.get("how"))
        elif stage == EventName.GO and Source.COORDINATOR in sources:
            known["cause"] = self.open.pop(incident, None)
        elif stage == EventName.INEXACT:
            known["is_first"] = record["generation"] not in self._inexact
            self._inexact.add(record["generation"])
        elif stage == EventName.FAULT_INJECTED:
            known["kind"] = _kind(str(record.get("spec")))
        for metric in EVENT_METRICS:
            if metric.source in sources and stage in metric.stages and metric.edge in (None, record["edge"]):
                amount = metric.amount(known)
                if amount is not None:
                    found = self._labelled(self._counted[metric.name], metric, str(known.get(metric.label)))
                    (found.observe if metric.buckets else found.inc)(amount)

    def page(self, now: Snapshot, account: Report | None, has_log: bool = True) -> bytes:
        """Return the metrics of a node, or of a coordinator in a separate process; ``account`` may be left out."""
        is_node = now.node != OUTSIDE
        due = {Source.AGENT: is_node, Source.COORDINATOR: now.job is not None, Source.RANKS: is_node and has_log}
        pages = [generate_latest(self._registries[source]) for source, is_due in due.items() if is_due]
        return b"".join([generate_latest(_Gauges(self._whose, self._about, now, account)), *pages])


# --- What the snapshot and the report say -------------------------------------------------------------------------

_Value = float | Mapping[Any, float | None] | None  # Any: a label, which is written as text


class _Gauges(Collector):
    """The metric families of one snapshot; a value that is not known yet has no sample."""

    def __init__(
        self, whose: Mapping[str, str], about: Mapping[str, str], now: Snapshot, account: Report | None
    ) -> None:
        self._whose, self._about, self._now, self._account = whose, about, now, account

    def collect(self) -> Iterator[Family]:
        now, about = self._now, {**self._whose, **self._about}
        info = GaugeMetricFamily("checkpointless_info", "What runs here; always 1.", labels=list(about))
        info.add_metric(list(about.values()), 1)
        yield info
        yield self._made("generation", "How often all ranks have begun together, less one.", now.generation)
        yield self._made("high_water_step", "Newest committed step that this node knows of.", now.high_water)
        yield self._made("incident_in_progress", "1 while ranks meet again.", now.incident is not None)
        if now.node != OUTSIDE:
            states = _states((rank.state for rank in now.ranks), _RANK_STATES)
            steps, ages = (
                {rank.rank: getattr(rank, of) for rank in now.ranks} for of in ("committed", "beat_age_s")
            )
            yield self._made("ranks", "Ranks of this node.", states, "state")
            yield self._made(
                "committed_step", "Last optimizer step that a rank of this node has applied.", steps, "rank"
            )
            yield self._made("beat_age_seconds", "Seconds since a rank of this node showed progress.", ages, "rank")
        if now.job is not None:
            nodes, ranks = ((each["state"] for each in of) for of in (now.job.nodes, now.job.ranks))
            yield self._made("job_nodes", "Nodes of the job.", _states(nodes, _NODE_STATES), "state")
            yield self._made("job_ranks", "Ranks of the job.", _states(ranks, _RANK_STATES), "state")
            yield self._made("job_spares", "Nodes that wait to take a lost one's place.", now.job.spares)
        if self._account is not None:
            yield from self._of_run(self._account)

    def _of_run(self, report: Report) -> Iterator[Family]:
        run, goodput = report.run, report.goodput
        # Causes that have taken no time so far are there with 0, so that rates see the first.
        spent = {} if goodput is None else {**dict.fromkeys((*CAUSES, *_CAUSES), 0.0), **goodput.seconds}
        ratio, ettr, training = (getattr(goodput, name, None) for name in ("ratio", "ettr", "ettr_while_training"))
        made = "Optimizer steps made; one that is repeated counts once."
        yield self._made("steps", made, run.steps, kind=CounterMetricFamily)
        yield self._made("step_seconds", "Seconds per optimizer step in undisturbed training.", run.step_s)
        yield self._made("goodput_ratio", "Training of steps that count over wall-clock time.", ratio)
        yield self._made("wall_seconds", "What the run's wall-clock time went to so far.", spent, "cause")
        yield self._made("ettr_ratio", "Effective training time over wall-clock time (ETTR).", ettr)
        yield self._made("ettr_while_training_ratio", "ETTR without start-up and shutdown.", training)

    def _made(
        self,
        name: str,
        help: str,
        value: _Value,
        label: str = "",
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
    ) -> Family:
        """Return a family; with a label, it has a value for each of the label's."""
        family = kind(f"checkpointless_{name}", help, labels=[*self._whose, *filter(None, [label])])
        for each, item in value.items() if isinstance(value, Mapping) else [("", value)]:
            if item is not None:
                family.add_metric([*self._whose.values(), *([str(each)] if label else [])], item)
        return family


def _states(of: Iterable[str], known: Iterable[str]) -> Mapping[str, int]:
    counts = Counter(of)
    return {state: counts[state] for state in known}
