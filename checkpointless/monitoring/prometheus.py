"""Writes a snapshot in Prometheus's text format, using ``prometheus_client`` (the extra ``metrics``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from checkpointless.monitoring.durations import Durations
from checkpointless.monitoring.measured import Measured
from checkpointless.monitoring.snapshot import FATAL, OUTSIDE, WARNING, JobStatus, Snapshot
from checkpointless.wire.rank_state import RankState

__all__ = ["CONTENT_TYPE", "render"]

_CAUSES = ("SIGKILL", "exception", "exit", "hang", "node", "replace")  # always present, so that rates see the first
_NODE_STATES = ("absent", "joined", "loading")


def render(snapshot: Snapshot, measured: Measured | None = None) -> bytes:
    """Return the metrics in the format that :data:`CONTENT_TYPE` names.

    Args:
        snapshot: snapshot of a node's agent, or of a coordinator in a separate process, which tells of the job
            alone.
        measured: what the ranks of the node measured; None leaves it out.
    """
    registry = CollectorRegistry()
    registry.register(_Families(snapshot, measured))
    return generate_latest(registry)


class _Families(Collector):
    """The metric families of one snapshot; a value that is not known yet has no sample."""

    def __init__(self, snapshot: Snapshot, measured: Measured | None) -> None:
        self._snapshot = snapshot
        self._measured = measured

    def collect(self) -> Iterator[Metric]:
        """Yield every family that this node can report."""
        now = self._snapshot
        yield _gauge("generation", "How often all ranks have begun together, less one.", now.generation)
        yield _gauge("high_water_step", "Newest committed optimizer step that this node knows of.", now.high_water)
        yield _gauge("incident_in_progress", "1 while ranks are brought together again.", now.incident is not None)
        if now.node != OUTSIDE:
            yield from _of_node(now)
        if self._measured is not None:
            yield from _of_ranks(self._measured)
        if now.job is not None:
            yield from _of_job(now.job)


def _of_node(now: Snapshot) -> Iterator[Metric]:
    yield _by_state("ranks", "Ranks of this node.", (rank.state for rank in now.ranks), _RANK_STATES)
    yield _by_rank(
        "committed_step",
        "Last optimizer step that a rank of this node has applied.",
        ((rank.rank, rank.committed) for rank in now.ranks),
    )
    yield _by_rank(
        "beat_age_seconds",
        "Seconds since a rank of this node showed progress.",
        ((rank.rank, rank.beat_age_s) for rank in now.ranks),
    )
    yield CounterMetricFamily(
        "checkpointless_respawns", "Processes started on this node in place of dead ones.", now.respawns
    )
    yield CounterMetricFamily(
        "checkpointless_respawns_from_standbys", "Of these, those that had waited as standbys.", now.from_standbys
    )
    problems = CounterMetricFamily(
        "checkpointless_device_problems", "What was wrong with devices of this node.", labels=["severity"]
    )
    for severity, count in {FATAL: 0, WARNING: 0, **now.device_problems}.items():
        problems.add_metric([severity], count)
    yield problems


def _of_ranks(measured: Measured) -> Iterator[Metric]:
    yield _histogram(
        "stage_seconds",
        "Of each incident, how long a stage took the rank of this node that took longest.",
        "stage",
        measured.stages,
    )
    yield CounterMetricFamily(
        "checkpointless_transfer_bytes",
        "Bytes that ranks of this node received from living replicas.",
        measured.transfer_bytes,
    )
    faults = CounterMetricFamily(
        "checkpointless_faults_injected", "Faults caused on purpose in ranks of this node.", labels=["kind"]
    )
    for kind, count in measured.faults.items():
        faults.add_metric([kind], count)
    yield faults


def _of_job(job: JobStatus) -> Iterator[Metric]:
    incidents = CounterMetricFamily(
        "checkpointless_incidents", "Incidents that all ranks have met again after.", labels=["cause"]
    )
    for cause, count in {**dict.fromkeys(_CAUSES, 0), **job.causes}.items():
        incidents.add_metric([cause], count)
    yield incidents
    yield _histogram("recovery_seconds", "From a fault until the lost step was made.", "rung", job.rungs)
    yield CounterMetricFamily(
        "checkpointless_steps_lost", "Committed steps that storage did not bring back.", job.steps_lost
    )
    yield CounterMetricFamily(
        "checkpointless_nodes_given_up", "Nodes that a spare replaced because of a device.", job.given_up
    )
    yield _by_state("job_nodes", "Nodes of the job.", (node.state for node in job.nodes), _NODE_STATES)
    yield _by_state("job_ranks", "Ranks of the job.", (rank.state for rank in job.ranks), _RANK_STATES)
    yield _gauge("job_spares", "Nodes that wait to take a lost one's place.", job.spares)


_RANK_STATES = tuple(state.value for state in RankState)


def _gauge(name: str, what: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"checkpointless_{name}", what)
    if value is not None:
        family.add_metric([], value)
    return family


def _histogram(name: str, what: str, label: str, values: Mapping[str, Durations]) -> Metric:
    family = HistogramMetricFamily(f"checkpointless_{name}", what, labels=[label])
    for value, durations in values.items():
        bounds = (*(str(bound_s) for bound_s in durations.bounds_s), "+Inf")
        family.add_metric([value], list(zip(bounds, durations.counts)), durations.seconds)
    return family


def _by_rank(name: str, what: str, values: Iterable[tuple[int, float | None]]) -> Metric:
    family = GaugeMetricFamily(f"checkpointless_{name}", what, labels=["rank"])
    for rank, value in values:
        if value is not None:
            family.add_metric([str(rank)], value)
    return family


def _by_state(name: str, what: str, states: Iterable[str], known: Iterable[str]) -> Metric:
    family = GaugeMetricFamily(f"checkpointless_{name}", what, labels=["state"])
    counts = Counter(states)
    for state in known:
        family.add_metric([state], counts[state])
    return family
