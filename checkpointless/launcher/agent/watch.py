"""Looks at the agent and the coordinator a few times per second, and leaves what it sees as a snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.messages import RankState
from checkpointless.observability.monitoring.metrics import (
    OUTSIDE,
    JobNames,
    JobStatus,
    Metrics,
    RankStatus,
    RunLog,
    Snapshot,
    Source,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Edge, Event, EventLog

if TYPE_CHECKING:  # a node's agent loads torch, and a coordinator in a process of its own needs none
    from collections.abc import Iterator

    from checkpointless.launcher.agent.node import NodeAgent
    from checkpointless.launcher.coordinator.coordinator import Coordinator
    from checkpointless.launcher.coordinator.job import Node

_EVERY_S = 0.25

_SHARE = 50  # looking takes less than a fiftieth of the loop's time, however many ranks there are

_BEATING = (RankState.RUNNING, RankState.LEAVING)


class Watch:
    """Keeps the snapshot of a loop up to date, which is replaced and never changed.

    ``run_log`` reads what ranks measured and what the run's time was spent on; None before :meth:`log`.
    """

    def __init__(self, node: int, names: JobNames | None = None) -> None:
        self.snapshot = Snapshot(node)
        self.metrics = Metrics(node, names or JobNames())
        self.run_log: RunLog | None = None
        self._began_s = self._again_at_s = 0.0

    def log(self, path: Path | None) -> EventLog:
        """Return the event log of this node's agent, or of the coordinator; what is written to it is counted."""
        node = self.snapshot.node
        if path is not None:
            self.run_log = RunLog(path, node, self._own_ranks, self._take)
        return _WatchedLog(path, node, self.metrics)

    def look(self, agent: NodeAgent, coordinator: Coordinator | None, now_s: float) -> None:
        """Replace the snapshot if it is due; ``coordinator`` is None on nodes where the job's does not run."""
        if not self._is_due(now_s):
            return
        ranks = tuple(_ranks(agent, agent.clock()))
        committed = max((rank.committed for rank in ranks if rank.committed is not None), default=None)
        self.snapshot = Snapshot(
            node=agent.index,
            at_s=round(time.time(), 3),
            looked_at_s=now_s,
            generation=_known(agent.job.generation),
            high_water=_known(agent.job.began_after) if committed is None else committed,
            incident=agent.incident,
            exit_code=None if agent.job.outcome is None else agent.job.outcome.code,
            ranks=ranks,
            job=None if coordinator is None else self._job(coordinator),
        )
        self._looked(now_s)

    def look_from_outside(self, coordinator: Coordinator, now_s: float) -> None:
        """Replace the snapshot of a coordinator in a separate process, if it is due."""
        if not self._is_due(now_s):
            return
        job = self._job(coordinator)
        self.snapshot = Snapshot(
            node=OUTSIDE,
            at_s=round(time.time(), 3),
            looked_at_s=now_s,
            generation=_known(coordinator.job.generation),
            high_water=_known(coordinator.job.high_water),
            incident=next(reversed(self.metrics.open), None),
            exit_code=None if coordinator.job.outcome is None else coordinator.job.outcome.code,
            job=job,
        )
        self._looked(now_s)

    def _is_due(self, now_s: float) -> bool:
        self._began_s = time.perf_counter()
        return now_s >= self._again_at_s

    def _looked(self, now_s: float) -> None:
        self._again_at_s = now_s + max(_EVERY_S, _SHARE * (time.perf_counter() - self._began_s))

    def _own_ranks(self) -> frozenset[int]:
        return frozenset(rank.rank for rank in self.snapshot.ranks)

    def _take(self, event: Event) -> None:
        about = {"stage": event.stage, "edge": event.edge, "generation": event.generation}
        self.metrics.take((Source.RANKS,), {**event.fields, **about, "incident": event.incident})

    def _job(self, coordinator: Coordinator) -> JobStatus:
        return JobStatus(
            nodes=[_node(node) for node in coordinator.nodes],
            ranks=[
                {
                    "rank": rank.number,
                    "node": rank.node.index,
                    "state": rank.state.value,
                    "incarnation": rank.incarnation,
                }
                for rank in coordinator.ranks
            ],
            spares=len(coordinator.spares),
            incidents=self.metrics.incidents,
            cause=next(reversed(self.metrics.open.values()), None),
            inexact=coordinator.job.incidents.inexact,
        )


class _WatchedLog(EventLog):
    """An event log that counts what it is given."""

    def __init__(self, path: Path | None, node: int, metrics: Metrics) -> None:
        super().__init__(path, node=node)
        self._metrics = metrics

    def emit(
        self,
        stage: EventName,
        edge: Edge,
        *,
        generation: int,
        incident: str | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        super().emit(stage, edge, generation=generation, incident=incident, rank=rank, **fields)
        about = {"stage": stage, "edge": edge, "generation": generation, "incident": incident}
        self._metrics.take((Source.AGENT, Source.COORDINATOR), fields | about)


def _ranks(agent: NodeAgent, now_s: float) -> Iterator[RankStatus]:
    for rank in agent.ranks.values():
        reading = rank.board.read()
        yield RankStatus(
            rank.number,
            rank.state.value,
            rank.pid if rank.state is not RankState.GONE else None,
            rank.incarnation,
            _known(reading.committed),
            _known(reading.making),
            round(max(0.0, now_s - rank.beats.at_s), 3) if rank.state in _BEATING else None,
        )


def _node(node: Node) -> dict[str, Any]:
    state = "joined" if node.joined else "absent" if node.lost else "loading"
    return {"node": node.index, "state": state, "why": node.lost}


def _known(number: int) -> int | None:
    """Return a step or a generation, or None for -1."""
    return None if number == NO_STEP else number
