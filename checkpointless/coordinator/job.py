"""A job as its coordinator knows it: its phase, its members, its progress and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from checkpointless.coordinator.incident_tracker import IncidentTracker
from checkpointless.coordinator.limits import Limits
from checkpointless.coordinator.progress import ProgressReports
from checkpointless.coordinator.rendezvous import Rendezvous
from checkpointless.coordinator.roster import NOT_YET, Node, Roster
from checkpointless.telemetry.events import EventLog
from checkpointless.wire.board import NO_STEP
from checkpointless.wire.node_messages import Command, End

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
        limits: the limits on ranks, nodes and incidents.
        nnodes: how many nodes train.
        nproc: how many ranks each node runs.
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
        limits: Limits,
        *,
        nnodes: int,
        nproc: int,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.say = say
        self.clock = clock
        self.roster = Roster(nnodes, nproc)
        self.rendezvous = Rendezvous(nnodes, nproc)
        self.incidents = IncidentTracker(limits.max_incidents, events, say)
        self.progress = ProgressReports(nnodes)
        self.high_water = NO_STEP
        self.target = NO_STEP
        self.origin = 0
        self.restarts = 0
        self.reenters_by_new_processes = ""
        self.gather_by_s: float | None = clock() + limits.join_timeout_s
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
