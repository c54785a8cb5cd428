"""A job as its coordinator knows it: its phase, its members, its progress and how it ended."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from enum import Enum

from checkpointless.launcher.coordinator.incident_tracker import IncidentTracker
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.coordinator.roster import NOT_YET, Node, Roster
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.node_messages import Command, End, Progress
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.system.environment import (
    GROUP_RANK_ENV,
    GROUP_WORLD_SIZE_ENV,
    JOB_RESTART_COUNT_ENV,
    LOCAL_RANK_ENV,
    LOCAL_WORLD_SIZE_ENV,
    MASTER_ADDR_ENV,
    MASTER_PORT_ENV,
    NODE_RANK_ENV,
    RANK_ENV,
    ROLE_NAME_ENV,
    ROLE_RANK_ENV,
    ROLE_WORLD_SIZE_ENV,
    TORCHELASTIC_MAX_RESTARTS_ENV,
    TORCHELASTIC_RESTART_COUNT_ENV,
    TORCHELASTIC_RUN_ID_ENV,
    TORCHELASTIC_USE_AGENT_STORE_ENV,
    WORLD_SIZE_ENV,
)

FAILED = 1  # the exit code whatever the reason, as with torchrun


class Phase(Enum):
    """What a job is doing.

    ``JOINING`` goes to ``GATHERING`` once all nodes can start processes. ``GATHERING`` and ``RUNNING`` alternate: a
    generation begins, and an incident stops it. ``RUNNING`` goes to ``FINISHING`` once every rank's block has
    returned. Every phase can go to ``OVER``, and none follows it. A coordinator that takes a running job over goes
    from ``JOINING`` through ``GATHERING`` to the phase that it finds the job in.
    """

    JOINING = "nodes join; no process has been asked for"
    GATHERING = "ranks are on their way to the barrier"
    RUNNING = "ranks are in their block"
    FINISHING = "every rank's block has returned; processes end"
    OVER = "the job has ended"


class Job:
    """The state of a job, which the parts of the coordinator share.

    Args:
        config: what is asked of the job.
        events: the job's event log.
        say: called with lines for the terminal.
        clock: the coordinator's clock, in seconds.

    Attributes:
        roster: the nodes and ranks.
        rendezvous: where the ranks of the coming generation meet.
        incidents: the incidents, and the generation.
        progress: the nodes' reports of this generation.
        high_water: the highest optimizer step that any rank was seen to commit (-1: none).
        target: the step after which the recovery is over (-1: none).
        origin: the generation that begins from nothing: 0, or that of the last restart of the whole job.
        restarts: how often the whole job was restarted.
        reenters_by_new_processes: why new processes take over at every fault ("": living ones enter their block
            again).
        replace_at_s: when missing nodes of a job that is taken over are replaced, on the coordinator's clock (None:
            none is waited for).
        gather_by_s: by when nodes and ranks have to be together, on the coordinator's clock (None: no limit runs).
        outcome: how the job ended; None as long as it has not.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        nnodes, nproc = config.nnodes, config.nproc_per_node
        self.say = say
        self.clock = clock
        self.roster = Roster(nnodes, nproc)
        self.rendezvous = _Rendezvous(nnodes, nproc)
        self.incidents = IncidentTracker(config.max_incidents, events, say)
        self.progress = ProgressReports(nnodes)
        self.high_water = NO_STEP
        self.target = NO_STEP
        self.origin = 0
        self.restarts = 0
        self.reenters_by_new_processes = ""
        self.gather_by_s: float | None = clock() + config.join_timeout_s
        self.replace_at_s: float | None = None
        self.outcome: End | None = None
        self._phase = Phase.JOINING

    @property
    def phase(self) -> Phase:
        """What the job is doing."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to another phase, unless the job is over."""
        if self._phase is not Phase.OVER:
            self._phase = phase

    @property
    def generation(self) -> int:
        """The generation that began last (-1: none)."""
        return self.incidents.generation

    @property
    def coming(self) -> int:
        """The generation that begins next."""
        return self.generation + 1

    def end(self, code: int, *last_words: str) -> None:
        """End the job, unless it has ended already.

        Args:
            code: the exit code.
            last_words: why, for the terminal; empty lines are left out.
        """
        if self.outcome is None:
            self.outcome = End(code, [line for line in last_words if line])
            self.enter(Phase.OVER)
            self.tell_nodes(self.outcome)

    def tell_nodes(self, command: Command) -> None:
        """Send a command to every node that has joined; that the job is over is sent to spares, too."""
        nodes: list[Node] = self.roster.nodes
        if isinstance(command, End):
            nodes = [*nodes, *self.roster.spares]
        for node in nodes:
            if node.lost != NOT_YET:
                node.send(command)


class ProgressReports:
    """The latest report of each node on how far its ranks have come.

    The nodes of a job are a step or two apart, so their reports name only a few different steps.

    Args:
        nnodes: how many nodes the job has.
    """

    def __init__(self, nnodes: int) -> None:
        self._nnodes = nnodes
        self._said: dict[int, Progress] = {}
        self._oldest: Counter[int] = Counter()
        self._newest: Counter[int] = Counter()
        self._timed = 0  # how many nodes know how long a step takes
        self._longest_ms = 0

    @property
    def are_complete(self) -> bool:
        """Whether every node has reported in this generation."""
        return len(self._said) == self._nnodes

    @property
    def oldest(self) -> int:
        """The smallest committed step on any node."""
        return min(self._oldest)

    @property
    def newest(self) -> int:
        """The largest committed step on any node."""
        return max(self._newest)

    @property
    def longest_s(self) -> float:
        """The longest time that any rank took from one beat to the next in a step; 0 until every node knows."""
        return self._longest_ms / 1000 if self._timed == self._nnodes else 0.0

    def began_after(self, generation: int) -> int:
        """Return the newest step that a training of a generation began after.

        If none has said, it is the newest one committed. A report may have been under way when a generation began.
        """
        told = [said.began_after for said in self._said.values() if said.generation == generation]
        newest = max(told, default=NO_STEP)
        return self.newest if newest == NO_STEP else newest

    def put(self, node: int, progress: Progress) -> None:
        """Record a node's new report."""
        self.drop(node)
        self._said[node] = progress
        self._oldest[progress.oldest] += 1
        self._newest[progress.newest] += 1
        self._timed += progress.longest_ms > 0
        self._longest_ms = max(self._longest_ms, progress.longest_ms)

    def drop(self, node: int) -> None:
        """Forget a node's report, if there is one."""
        before = self._said.pop(node, None)
        if before is not None:
            _take_one(self._oldest, before.oldest)
            _take_one(self._newest, before.newest)
            self._timed -= before.longest_ms > 0

    def forget(self) -> None:
        """Forget all reports, because another generation begins."""
        for report in (self._said, self._oldest, self._newest):
            report.clear()
        self._timed = self._longest_ms = 0


def _take_one(counts: Counter[int], value: int) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]


class _Rendezvous:
    """Where the ranks of the coming generation meet, and the environment variables that lead there.

    They meet at a store in the agent of a node, so they do not notice if the coordinator is lost.

    Args:
        nnodes: how many nodes there are.
        nproc: how many ranks each node runs.

    Attributes:
        run_id: the job's run ID.
        generation: the generation whose store was asked for last (-1: none).
        host: number of the node that was asked for that store (-1: none).
    """

    def __init__(self, nnodes: int, nproc: int) -> None:
        self.nnodes = nnodes
        self.nproc = nproc
        self.run_id = uuid.uuid4().hex
        self.generation = -1
        self.host = -1
        self._where: tuple[str, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the store is open."""
        return self._where is not None

    def ask(self, generation: int, host: int) -> None:
        """Note that node ``host`` is asked for the store of ``generation``; none is open until it says where."""
        self.generation, self.host, self._where = generation, host, None

    def opened(self, generation: int, host: int, address: str, port: int) -> bool:
        """Note that a node has opened a store.

        Returns:
            Whether it is the store that was asked for.
        """
        if (generation, host) != (self.generation, self.host):
            return False
        self._where = (address, port)
        return True

    def go_env(self) -> dict[str, str]:
        """Return the environment variables of a rank that change when the generation begins.

        Raises:
            RuntimeError: no store is open.
        """
        if self._where is None:
            raise RuntimeError(f"generation {self.generation} has no store")
        address, port = self._where
        return {
            MASTER_ADDR_ENV: address,
            MASTER_PORT_ENV: str(port),
            TORCHELASTIC_RESTART_COUNT_ENV: str(self.generation),
            JOB_RESTART_COUNT_ENV: str(self.generation),
        }

    def rank_env(self, rank: int, node: int) -> dict[str, str]:
        """Return all environment variables that a new rank needs to join the generation, named as by torchrun."""
        world_size = str(self.nnodes * self.nproc)
        return {
            RANK_ENV: str(rank),
            LOCAL_RANK_ENV: str(rank % self.nproc),
            ROLE_RANK_ENV: str(rank),
            WORLD_SIZE_ENV: world_size,
            LOCAL_WORLD_SIZE_ENV: str(self.nproc),
            ROLE_WORLD_SIZE_ENV: world_size,
            ROLE_NAME_ENV: "default",
            NODE_RANK_ENV: str(node),
            GROUP_RANK_ENV: str(node),
            GROUP_WORLD_SIZE_ENV: str(self.nnodes),
            TORCHELASTIC_RUN_ID_ENV: self.run_id,
            TORCHELASTIC_MAX_RESTARTS_ENV: "0",
            TORCHELASTIC_USE_AGENT_STORE_ENV: "True",
            **self.go_env(),
        }
