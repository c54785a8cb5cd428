"""What the agent's loop tells other threads: an immutable snapshot that it replaces a few times per second.

Only the loop calls :class:`Watch`; other threads only read its ``snapshot``, so no thread ever waits for another.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.agent.board import NO_STEP
from checkpointless.agent.durations import Durations
from checkpointless.agent.measured import Measuring
from checkpointless.agent.workers import WorkerState
from checkpointless.telemetry.events import Edge, EventLog
from checkpointless.telemetry.incidents import Rung

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from checkpointless.agent.coordinator import Coordinator
    from checkpointless.agent.node import NodeAgent
    from checkpointless.agent.roster import Node

RECOVERY_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OUTSIDE = -1  # in place of a node's number: a coordinator in a separate process is no node
STALE_S = 5.0  # a loop that has not turned for this long counts as stuck
_EVERY_S = 0.25
_SHARE = 50  # looking takes less than a fiftieth of the loop's time, however many ranks there are
_RUNGS = tuple(rung.label for rung in Rung)
_NO_RECOVERIES = Durations.none(RECOVERY_BUCKETS_S)
_BEATING = (WorkerState.RUNNING, WorkerState.LEAVING)


@dataclass(frozen=True)
class RankStatus:
    """A rank of this node.

    Attributes:
        committed: the last optimizer step that the rank's board shows (None: none yet).
        making: the step in the making that the rank's board shows (None: none yet).
        beat_age_s: seconds since the rank last showed progress; None while it is not in its block.
    """

    rank: int
    state: str
    pid: int | None
    incarnation: int
    committed: int | None
    making: int | None
    beat_age_s: float | None


@dataclass(frozen=True)
class JobNode:
    """A node, as the coordinator knows it.

    Attributes:
        state: ``joined``, ``loading`` (its agent is connected but cannot start ranks yet) or ``absent``.
        why: why the node is absent.
    """

    node: int
    state: str
    why: str


@dataclass(frozen=True)
class JobRank:
    """A rank of any node, as the coordinator knows it."""

    rank: int
    node: int
    state: str
    incarnation: int


@dataclass(frozen=True)
class JobStatus:
    """The whole job, which only the coordinator knows.

    Attributes:
        spares: how many nodes wait to take the place of a lost node.
        incidents: how many incidents there were, including the one in progress.
        cause: how the cause of the incident in progress came about: ``exception``, ``hang``, ``SIGKILL``...
        causes: how many incidents the ranks have met again after, by how the incident's cause came about.
        recoveries: time from the fault until the lost step was made, of the incidents after which it was made.
        rungs: the times in ``recoveries``, by how far up the recovery went (the labels of
            :class:`~checkpointless.telemetry.incidents.Rung`).
        steps_lost: how many committed steps storage did not bring back.
    """

    nodes: tuple[JobNode, ...]
    ranks: tuple[JobRank, ...]
    spares: int
    incidents: int
    cause: str | None
    causes: Mapping[str, int]
    recoveries: Durations
    rungs: Mapping[str, Durations]
    steps_lost: int = 0


@dataclass(frozen=True)
class Snapshot:
    """One look at this node's part of the job.

    Attributes:
        node: number of the node; :data:`OUTSIDE` for a coordinator in a separate process.
        at_s: when the look was taken, in seconds since the epoch.
        looked_at_s: when the look was taken, on the monotonic clock (None: the agent has not joined the job).
        generation: the generation that began last (None: none yet).
        high_water: the highest committed step that this node knows of (None: none yet).
        incident: the incident that the ranks are being brought together for (None: none).
        respawns: how many processes were started in place of dead ones.
        exit_code: the job's exit code (None: the job has not ended).
        job: the whole job; None where the coordinator does not run.
    """

    node: int
    at_s: float = 0.0
    looked_at_s: float | None = None
    generation: int | None = None
    high_water: int | None = None
    incident: str | None = None
    respawns: int = 0
    exit_code: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    job: JobStatus | None = None

    def health(self, now_s: float) -> tuple[bool, str]:
        """Return whether the loop turns and the job goes on, and a short text that says so.

        Args:
            now_s: the current time on the monotonic clock.
        """
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


@dataclass
class Tally:
    """Counts what the agent of this node, or the coordinator, writes into the event log.

    Attributes:
        incidents: how many incidents were seen.
        open: how the cause came about, for each incident whose ranks have not met again.
        causes: how many of the other incidents there were, by how the cause came about.
        recoveries: see :class:`JobStatus`.
        rungs: see :class:`JobStatus`.
        respawns: see :class:`Snapshot`.
        steps_lost: see :class:`JobStatus`.
    """

    incidents: int = 0
    open: dict[str, str] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)
    recoveries: Durations = _NO_RECOVERIES
    rungs: dict[str, Durations] = field(default_factory=lambda: dict.fromkeys(_RUNGS, _NO_RECOVERIES))
    respawns: int = 0
    steps_lost: int = 0

    def event(self, stage: str, edge: str, incident: str | None, fields: Mapping[str, Any]) -> None:
        """Count an event; of several ``detect`` events of an incident, the last knows best how it came about."""
        if stage == "respawn" and edge == "begin":
            self.respawns += 1
        elif stage == "detect" and incident is not None:
            self.incidents += incident not in self.open
            self.open[incident] = str(fields.get("how"))
        elif stage == "go" and incident in self.open:
            self.causes[self.open.pop(incident)] += 1
        elif stage == "recovered":
            seconds = float(fields["seconds"])
            rung = str(fields["rung"])
            self.recoveries = self.recoveries.and_one_of(seconds)
            self.steps_lost += int(fields["steps_lost"] or 0)
            self.rungs[rung] = self.rungs[rung].and_one_of(seconds)


class Watch:
    """Keeps the snapshot of a loop up to date.

    Args:
        node: number of this node, or :data:`OUTSIDE`.

    Attributes:
        snapshot: the newest snapshot; it is replaced, never changed.
        measuring: reads what the ranks of this node measured; None before :meth:`log`, and outside of nodes.
    """

    def __init__(self, node: int) -> None:
        self.snapshot = Snapshot(node)
        self.measuring: Measuring | None = None
        self._tally = Tally()
        self._began_s = self._again_at_s = 0.0

    def log(self, path: Path | None) -> EventLog:
        """Return the event log of this node's agent, or of the coordinator; what is written to it is counted here.

        Args:
            path: path of the log; None drops what is written after it was counted.
        """
        node = self.snapshot.node
        if node != OUTSIDE and path is not None:
            self.measuring = Measuring(path, node, self._own_ranks)
        return _WatchedLog(path, node, self._tally)

    def look(self, agent: NodeAgent, coordinator: Coordinator | None, now_s: float) -> None:
        """Replace the snapshot if it is due.

        Args:
            coordinator: the job's coordinator; None on nodes where it does not run.
            now_s: the current time on the monotonic clock.
        """
        if not self._is_due(now_s):
            return
        ranks = tuple(_ranks(agent, agent.clock()))
        committed = max((rank.committed for rank in ranks if rank.committed is not None), default=None)
        self.snapshot = Snapshot(
            node=agent.index,
            at_s=round(time.time(), 3),
            looked_at_s=now_s,
            generation=_known(agent.generation),
            high_water=_known(agent.began_after) if committed is None else committed,
            incident=agent.incident,
            respawns=self._tally.respawns,
            exit_code=None if agent.outcome is None else agent.outcome.code,
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
            generation=_known(coordinator.generation),
            high_water=_known(coordinator.high_water),
            incident=next(reversed(self._tally.open), None),
            exit_code=None if coordinator.outcome is None else coordinator.outcome.code,
            job=job,
        )
        self._looked(now_s)

    def _is_due(self, now_s: float) -> bool:
        self._began_s = time.perf_counter()
        return now_s >= self._again_at_s

    def _looked(self, now_s: float) -> None:
        self._again_at_s = now_s + max(_EVERY_S, _SHARE * (time.perf_counter() - self._began_s))

    def _own_ranks(self) -> tuple[frozenset[int], bool]:
        now = self.snapshot
        return frozenset(rank.rank for rank in now.ranks), now.exit_code is not None

    def _job(self, coordinator: Coordinator) -> JobStatus:
        return JobStatus(
            nodes=tuple(_node(node) for node in coordinator.nodes),
            ranks=tuple(
                JobRank(rank.number, rank.node.index, rank.state.value, rank.incarnation)
                for rank in coordinator.ranks
            ),
            spares=len(coordinator.spares),
            incidents=self._tally.incidents,
            cause=next(reversed(self._tally.open.values()), None),
            causes=dict(self._tally.causes),
            recoveries=self._tally.recoveries,
            rungs=dict(self._tally.rungs),
            steps_lost=self._tally.steps_lost,
        )


class _WatchedLog(EventLog):
    """An event log that counts what it is given."""

    def __init__(self, path: Path | None, node: int, tally: Tally) -> None:
        super().__init__(path, node=node)
        self._tally = tally

    def emit(
        self,
        stage: str,
        edge: Edge,
        *,
        generation: int,
        incident: str | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        """Append one event, and count it."""
        super().emit(stage, edge, generation=generation, incident=incident, rank=rank, **fields)
        self._tally.event(stage, edge, incident, fields)


def _ranks(agent: NodeAgent, now_s: float) -> Iterator[RankStatus]:
    for worker in agent.workers.values():
        reading = worker.board.read()
        yield RankStatus(
            worker.rank,
            worker.state.value,
            worker.pid if worker.state is not WorkerState.GONE else None,
            worker.incarnation,
            _known(reading.committed),
            _known(reading.making),
            round(max(0.0, now_s - worker.beat_at_s), 3) if worker.state in _BEATING else None,
        )


def _node(node: Node) -> JobNode:
    return JobNode(node.index, "joined" if node.joined else "absent" if node.lost else "loading", node.lost)


def _known(number: int) -> int | None:
    """Return a step or a generation, or None for -1."""
    return None if number == NO_STEP else number
