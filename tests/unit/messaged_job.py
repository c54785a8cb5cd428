"""Drive a coordinator by messages alone, without processes, sockets or a store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.job import Node
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.messages import Barrier, Command, FaultReport, Hello, NodeMessage, OpenStore
from checkpointless.observability.telemetry.events import EventLog

NPROC = 2
HEARTBEAT_S, REGROUP_S = 10.0, 30.0
AnyCommand = TypeVar("AnyCommand")


class Job:
    """Drives a coordinator and notes what it says to whom.

    Attributes:
        stores: which it had opened, and by which node.
        opens: whether the nodes open them at once.
        later_s: how much later it is for the coordinator than for the test.
    """

    def __init__(self, nnodes: int = 2, *, events: Path | None = None, **more: Any) -> None:
        self.said: list[str] = []
        self.sent: list[tuple[Node | None, Command]] = []
        self.stores: list[tuple[int, int]] = []
        self.opens = True
        self.later_s = 0.0
        self._to_open: list[tuple[Node, OpenStore]] = []
        limits: dict[str, Any] = {"heartbeat_timeout_s": HEARTBEAT_S, "regroup_timeout_s": REGROUP_S}
        config = JobConfig(nproc_per_node=NPROC, nnodes=nnodes, **limits | more)
        log = EventLog(events, node=0)
        self.coordinator = Coordinator(config, events=log, say=self.said.append, clock=self.now_s)
        self.ranks = range(nnodes * NPROC)

    def admit(self, index: int, nproc: int = NPROC) -> Node:
        place: list[Node] = []

        def send(command: Command) -> None:
            if isinstance(command, OpenStore):
                self.stores.append((command.generation, place[0].index))
                self._to_open.append((place[0], command))
            else:
                self.sent.append((place[0] if place else None, command))

        place.append(self.coordinator.membership.admit(index, nproc, send))
        return place[0]

    def hear(self, node: Node, message: NodeMessage) -> None:
        self.coordinator.hear(node, message)
        self.open_stores()

    def lose(self, node: Node, reason: str) -> None:
        self.coordinator.membership.lose(node, reason)
        self.open_stores()

    def open_stores(self) -> None:
        while self.opens and self._to_open:
            node, command = self._to_open.pop(0)
            if not node.lost:
                generation = command.generation
                self.coordinator.hear(
                    node, messages.StoreOpened(generation, f"10.0.0.{node.index}", 5000 + generation)
                )

    def opens_again(self) -> None:
        self.opens = True
        self.open_stores()

    def join(self, index: int) -> Node:
        node = self.admit(index)
        self.hear(node, messages.Joined())
        return node

    def join_all(self) -> Job:
        for node in self.coordinator.nodes:
            self.join(node.index)
        return self

    def progress(self, oldest: int, newest: int | None = None, longest_ms: int = 0, **more: Any) -> None:
        """Have every node report how far its ranks have come."""
        newest = oldest if newest is None else newest
        for node in self.coordinator.nodes:
            self.hear(node, messages.Progress(oldest, newest, newest + 1, longest_ms, **more))

    def tell(self, rank: int, message: NodeMessage) -> None:
        """Give the coordinator a message of the node of ``rank``."""
        self.hear(self.coordinator.ranks[rank].node, message)

    def ready(self, *ranks: int, **shown: Any) -> None:
        for rank in ranks:
            self.tell(rank, at_barrier(rank, self.coordinator.ranks[rank].incarnation, **shown))

    def raises(self, rank: int, kind: CauseKind = CauseKind.EXCEPTION, **more: Any) -> None:
        self.tell(rank, trouble(rank, kind, **{"generation": self.coordinator.job.generation, **more}))

    def ends(self, rank: int, code: int = -9, forgiven: bool = False, **more: Any) -> None:
        now = self.coordinator.ranks[rank].incarnation
        about = {"rank": rank, "incarnation": now, "committed": 3, "making": 4} | more
        self.tell(rank, messages.RankEnded(code, forgiven, f"rank-{rank}.log", ["its last line"], **about))

    def returns(self) -> None:
        """Have the block of every rank return."""
        for rank in self.ranks:
            self.tell(rank, messages.Done(self.coordinator.job.generation, rank=rank))

    def begin(self) -> Job:
        """Have all nodes join and all ranks get to the barrier, and forget what was sent until then."""
        self.join_all().ready(*self.ranks)
        self.sent.clear()
        return self

    def take(self, kind: type[AnyCommand]) -> list[tuple[int, AnyCommand]]:
        """Return the commands of one kind that were sent since they were last forgotten, and the node of each."""
        found = ((node, command) for node, command in self.sent if isinstance(command, kind))
        return [(-1 if node is None else node.index, command) for node, command in found]

    def started(self) -> list[tuple[int, int]]:
        """Return rank and incarnation of the processes that were asked for since then."""
        return [(spawn.rank, spawn.incarnation) for _, spawn in self.take(messages.Spawn)]

    def begun(self) -> list[int]:
        """Return the generations that nodes were told of since then to have begun."""
        return [begin.generation for _, begin in self.take(messages.Go)]

    def now_s(self) -> float:
        return time.monotonic() + self.later_s

    def tick(self, after_s: float = 0.0) -> None:
        self.coordinator.tick(self.now_s() + after_s)
        self.open_stores()

    @property
    def run_id(self) -> str:
        return self.coordinator.job.rendezvous.run_id

    @property
    def outcome(self) -> messages.End | None:
        return self.coordinator.job.outcome

    @property
    def last_word(self) -> str:
        assert self.outcome is not None
        assert self.outcome.code == 1
        return self.outcome.last_words[-1]


def at_barrier(
    rank: int, incarnation: int, committed: int = -1, making: int = -1, entered: bool = False, unfit: str = ""
) -> Hello | Barrier:
    """Return what a node passes on of a rank at the barrier, which in its block before if it has ``entered``."""
    shown = {"rank": rank, "incarnation": incarnation, "committed": committed, "making": making}
    return Barrier(0, unfit, **shown) if entered else Hello(0, **shown)


def go_env(generation: int, host: int = 0) -> dict[str, str]:
    count = str(generation)
    env = {"MASTER_ADDR": f"10.0.0.{host}", "MASTER_PORT": str(5000 + generation)}
    return {**env, "TORCHELASTIC_RESTART_COUNT": count, "JOB_RESTART_COUNT": count}


def trouble(rank: int, kind: CauseKind, *, generation: int = 0, what: str = "raised ValueError") -> FaultReport:
    cause = Cause(kind, rank, "exception", what, 4, "no", "ValueError", "no", "Traceback\n")
    return FaultReport(generation, cause, rank=rank, committed=3, making=4)
