"""Writes a snapshot in Prometheus's text format, using ``prometheus_client``.

Every sample has the labels ``job``, ``run`` and ``node``, which say whose it is wherever it is scraped: Prometheus
adds the address of the target (``instance``) and the name of the scrape configuration (``job``), and an address
belongs to another job tomorrow. They are the same for all samples of a process, so they multiply nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from checkpointless.launcher.protocol.node_messages import RankState
from checkpointless.observability.monitoring.accounting import Account
from checkpointless.observability.monitoring.durations import Durations
from checkpointless.observability.monitoring.measured import Measured
from checkpointless.observability.monitoring.snapshot import OUTSIDE, JobNames, JobStatus, Snapshot

__all__ = ["CONTENT_TYPE", "render"]

_CAUSES = ("SIGKILL", "exception", "exit", "hang", "node", "replace")  # always present, so that rates see the first
_NODE_STATES = ("absent", "joined", "loading")
_RANK_STATES = tuple(state.value for state in RankState)
_VERSION = version("checkpointless")
_GAUGE, _COUNTER, _HISTOGRAM = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily
_Part = TypeVar("_Part")
_Value = float | Durations | None


@dataclass(frozen=True)
class Metric(Generic[_Part]):
    """One metric, made from a part of what is known.

    Attributes:
        name: its name, without ``checkpointless_`` before it and ``_total`` after it.
        kind: the kind of its family.
        help: what it is.
        value: returns its value; with a label, the value of each of the label's values. None: not known yet.
        label: a label ("" without one).
    """

    name: str
    kind: Callable[..., Any]
    help: str
    value: Callable[[_Part], _Value | Mapping[Any, _Value]]
    label: str = ""


def _states(of: Iterable[Any], known: Iterable[str]) -> Mapping[str, int]:
    counts = Counter(each.state for each in of)
    return {state: counts[state] for state in known}


_OF_ALL: tuple[Metric[Snapshot], ...] = (
    Metric("generation", _GAUGE, "How often all ranks have begun together, less one.", lambda now: now.generation),
    Metric("high_water_step", _GAUGE, "Newest committed step that this node knows of.", lambda now: now.high_water),
    Metric("incident_in_progress", _GAUGE, "1 while ranks meet again.", lambda now: now.incident is not None),
)
_OF_NODE: tuple[Metric[Snapshot], ...] = (
    Metric("ranks", _GAUGE, "Ranks of this node.", lambda now: _states(now.ranks, _RANK_STATES), "state"),
    Metric(
        "committed_step",
        _GAUGE,
        "Last optimizer step that a rank of this node has applied.",
        lambda now: {rank.rank: rank.committed for rank in now.ranks},
        "rank",
    ),
    Metric(
        "beat_age_seconds",
        _GAUGE,
        "Seconds since a rank of this node showed progress.",
        lambda now: {rank.rank: rank.beat_age_s for rank in now.ranks},
        "rank",
    ),
    Metric("respawns", _COUNTER, "Processes started on this node in place of dead ones.", lambda now: now.respawns),
    Metric(
        "device_checks_failed",
        _COUNTER,
        "Device checks that failed on this node.",
        lambda now: now.device_checks_failed,
    ),
)
_OF_RANKS: tuple[Metric[Measured], ...] = (
    Metric(
        "stage_seconds",
        _HISTOGRAM,
        "Of each incident, how long a stage took the rank of this node that took longest.",
        lambda measured: measured.stages,
        "stage",
    ),
    Metric(
        "transfer_bytes",
        _COUNTER,
        "Bytes that ranks of this node received from living replicas.",
        lambda measured: measured.transfer_bytes,
    ),
    Metric(
        "faults_injected",
        _COUNTER,
        "Faults caused on purpose in ranks of this node.",
        lambda measured: measured.faults,
        "kind",
    ),
    Metric(
        "inexact_incidents",
        _COUNTER,
        "Incidents after which a rank of this node no longer computed what an undisturbed run computes.",
        lambda measured: measured.inexact,
    ),
)
_OF_JOB: tuple[Metric[JobStatus], ...] = (
    Metric(
        "incidents",
        _COUNTER,
        "Incidents that all ranks have met again after.",
        lambda job: {**dict.fromkeys(_CAUSES, 0), **job.causes},
        "cause",
    ),
    Metric("recovery_seconds", _HISTOGRAM, "From a fault until the step was made.", lambda job: job.rungs, "rung"),
    Metric("steps_lost", _COUNTER, "Committed steps that storage lost.", lambda job: job.steps_lost),
    Metric("nodes_given_up", _COUNTER, "Nodes given up because of a device.", lambda job: job.given_up),
    Metric("job_nodes", _GAUGE, "Nodes of the job.", lambda job: _states(job.nodes, _NODE_STATES), "state"),
    Metric("job_ranks", _GAUGE, "Ranks of the job.", lambda job: _states(job.ranks, _RANK_STATES), "state"),
    Metric("job_spares", _GAUGE, "Nodes that wait to take a lost one's place.", lambda job: job.spares),
)
_OF_RUN: tuple[Metric[Account], ...] = (
    Metric("steps", _COUNTER, "Optimizer steps made; one that is repeated counts once.", lambda run: run.steps),
    Metric("step_seconds", _GAUGE, "Seconds per optimizer step in undisturbed training.", lambda run: run.step_s),
    Metric(
        "ettr_ratio", _GAUGE, "Effective training time over wall-clock time (ETTR, goodput).", lambda run: run.ettr
    ),
    Metric(
        "ettr_while_training_ratio",
        _GAUGE,
        "ETTR without start-up and shutdown.",
        lambda run: run.ettr_while_training,
    ),
    Metric("time_seconds", _GAUGE, "What the run's time was spent on so far.", lambda run: run.spent_s, "activity"),
)


def render(
    snapshot: Snapshot,
    measured: Measured | None = None,
    account: Account | None = None,
    names: JobNames | None = None,
) -> bytes:
    """Return the metrics in the format that :data:`CONTENT_TYPE` names.

    Args:
        snapshot: snapshot of a node's agent, or of a coordinator in a separate process, which tells of the job
            alone.
        measured: what the ranks of the node measured; None leaves it out.
        account: what the run's time was spent on; None leaves it out.
        names: what the job is called; None: nobody knows.
    """
    registry = CollectorRegistry()
    registry.register(_Families(snapshot, measured, account, names or JobNames()))
    return generate_latest(registry)


class _Families(Collector):
    """The metric families of one snapshot; a value that is not known yet has no sample."""

    def __init__(
        self, snapshot: Snapshot, measured: Measured | None, account: Account | None, names: JobNames
    ) -> None:
        self._snapshot = snapshot
        self._measured = measured
        self._account = account
        self._names = names
        node = "coordinator" if snapshot.node == OUTSIDE else str(snapshot.node)
        whose = {"job": names.job, "run": names.run, "node": node}
        self._whose = {name: value for name, value in whose.items() if value}

    def collect(self) -> Iterator[Family]:
        """Yield every family that this node can report."""
        now = self._snapshot
        about = {**self._whose, "version": _VERSION, "script": self._names.script, "run_dir": self._names.run_dir}
        info = GaugeMetricFamily("checkpointless_info", "What runs here; always 1.", labels=list(about))
        info.add_metric(list(about.values()), 1)
        yield info
        yield from self._made(_OF_ALL, now)
        if now.node != OUTSIDE:
            yield from self._made(_OF_NODE, now)
        if self._measured is not None:
            yield from self._made(_OF_RANKS, self._measured)
        if now.job is not None:
            yield from self._made(_OF_JOB, now.job)
        if self._account is not None:
            yield from self._made(_OF_RUN, self._account)

    def _made(self, metrics: Iterable[Metric[_Part]], part: _Part) -> Iterator[Family]:
        for metric in metrics:
            labels = [*self._whose, *([metric.label] if metric.label else [])]
            family = metric.kind(f"checkpointless_{metric.name}", metric.help, labels=labels)
            value = metric.value(part)
            for label, item in value.items() if isinstance(value, Mapping) else [("", value)]:
                here = [*self._whose.values(), *([str(label)] if metric.label else [])]
                if isinstance(item, Durations):
                    bounds = (*(str(bound_s) for bound_s in item.bounds_s), "+Inf")
                    family.add_metric(here, list(zip(bounds, item.counts)), item.seconds)
                elif item is not None:
                    family.add_metric(here, item)
            yield family
