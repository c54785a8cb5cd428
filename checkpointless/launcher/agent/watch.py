"""Looks at the agent and the coordinator a few times per second, and leaves what it sees as a snapshot."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.messages import RankState
from checkpointless.observability.monitoring.metrics import JobStatus, Metrics, RankStatus, RunLog, Snapshot, Source
from checkpointless.observability.telemetry.events import Event, EventLog

if TYPE_CHECKING:  # a node's agent loads torch, and a coordinator in a process of its own needs none
    from collections.abc import Iterator

    from checkpointless.launcher.agent.node import NodeAgent
    from checkpointless.launcher.coordinator.coordinator import Coordinator
    from checkpointless.launcher.coordinator.job import Node

_EVERY_S = 0.25

_SHARE = 50  # looking takes less than a fiftieth of the loop's time, however many ranks there are

_BEATING = (RankState.RUNNING, RankState.LEAVING)


class Watch:
    """Keeps the snapshot of a loop up to date, which is replaced and never changed."""

    def __init__(self, node: int, job: str = "", run_dir: str = "", script: str = "") -> None:
        self.snapshot = Snapshot(node)
        self.metrics = Metrics(node, job, run_dir, script)
        self.run_log: RunLog | None = None
        self._again_at_s = 0.0

    def log(self, path: Path | None) -> EventLog:
        """Return the event log of this node's agent, or of the coordinator; what is written to it is counted."""
        node = self.snapshot.node
        if path is not None:
            self.run_log = RunLog(path, node, self._own_ranks, self._take)
        return EventLog(path, node=node, seen=partial(self.metrics.take, (Source.AGENT, Source.COORDINATOR)))

    def look(self, agent: NodeAgent | None, coordinator: Coordinator | None, now_s: float) -> None:
        """Replace the snapshot if it is due; a coordinator's process has no agent, most nodes no coordinator."""
        began_s = time.perf_counter()
        about = agent or coordinator
        if now_s < self._again_at_s or about is None:
            return
        step, incident, ranks = NO_STEP, next(reversed(self.metrics.open), None), tuple[RankStatus, ...]()
        if agent is not None:
            step, incident, ranks = agent.job.began_after, agent.incident, tuple(_ranks(agent, agent.clock()))
        elif coordinator is not None:
            step = coordinator.job.high_water
        committed = [rank.committed for rank in ranks if rank.committed is not None]
        self.snapshot = Snapshot(
            node=self.snapshot.node,
            at_s=round(time.time(), 3),
            looked_at_s=now_s,
            generation=_known(about.job.generation),
            high_water=_known(max(committed, default=step)),
            incident=incident,
            exit_code=None if about.job.outcome is None else about.job.outcome.code,
            ranks=ranks,
            job=None if coordinator is None else self._job(coordinator),
        )
        self._again_at_s = now_s + max(_EVERY_S, _SHARE * (time.perf_counter() - began_s))

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
    return None if number == NO_STEP else number
