"""A snapshot in Prometheus's text format, written by ``prometheus_client`` (the extra ``metrics``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from checkpointless.agent.status import BUCKETS_S, JobStatus, Snapshot
from checkpointless.agent.workers import WorkerState

__all__ = ["CONTENT_TYPE", "render"]

_CAUSES = ("SIGKILL", "exception", "exit", "hang", "node", "replace")  # from the start, so that rates see the first
_NODE_STATES = ("absent", "joined", "loading")


def render(snapshot: Snapshot) -> bytes:
    """The metrics, in the format that :data:`CONTENT_TYPE` names."""
    registry = CollectorRegistry()
    registry.register(_Families(snapshot))
    return generate_latest(registry)


class _Families(Collector):
    """The families of one snapshot; what is not known yet has no sample."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every family that this node can tell of."""
        now = self._snapshot
        yield _gauge("generation", "How often all ranks have begun together, less one.", now.generation)
        yield _gauge("high_water_step", "Newest committed optimizer step that this node knows of.", now.high_water)
        yield _gauge("incident_in_progress", "1 while ranks are brought together again.", now.incident is not None)
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
        if now.job is not None:
            yield from _of_job(now.job)


def _of_job(job: JobStatus) -> Iterator[Metric]:
    incidents = CounterMetricFamily(
        "checkpointless_incidents", "Incidents that all ranks have met again after.", labels=["cause"]
    )
    for cause, count in {**dict.fromkeys(_CAUSES, 0), **job.causes}.items():
        incidents.add_metric([cause], count)
    yield incidents
    bounds = (*(str(bound_s) for bound_s in BUCKETS_S), "+Inf")
    yield HistogramMetricFamily(
        "checkpointless_recovery_seconds",
        "From a fault until the lost step was made.",
        buckets=list(zip(bounds, job.recoveries.counts)),
        sum_value=job.recoveries.seconds,
    )
    yield _by_state("job_nodes", "Nodes of the job.", (node.state for node in job.nodes), _NODE_STATES)
    yield _by_state("job_ranks", "Ranks of the job.", (rank.state for rank in job.ranks), _RANK_STATES)
    yield _gauge("job_spares", "Nodes that wait to take a lost one's place.", job.spares)


_RANK_STATES = tuple(state.value for state in WorkerState)


def _gauge(name: str, what: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"checkpointless_{name}", what)
    if value is not None:
        family.add_metric([], value)
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
