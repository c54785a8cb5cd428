"""The coordinator, which decides for all nodes who takes part, when a generation begins and when the job is over.

It receives messages from the nodes' agents and sends them commands; it knows nothing about processes or about the
connections of ranks. It runs in the loop of an agent or in a separate process. Nothing here blocks.

What follows from a rank without progress: inquiries, reports of stalls, and ranks that are made to leave.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from checkpointless.launcher.coordinator.hang_policy import Whereabouts
from checkpointless.launcher.coordinator.hang_watch import HangWatch, Stall
from checkpointless.launcher.coordinator.job import FAILED, Job, Phase
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.coordinator.membership import BadDevices, Membership
from checkpointless.launcher.coordinator.processes import Processes
from checkpointless.launcher.coordinator.regrouping import Regrouping
from checkpointless.launcher.coordinator.roster import Node, Rank
from checkpointless.launcher.coordinator.takeover import Takeover
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.node_messages import (
    IN_BLOCK,
    Alive,
    Answered,
    Ask,
    Command,
    DeviceBad,
    End,
    Holding,
    JobOver,
    Joined,
    Leaving,
    NodeMessage,
    Progress,
    RankDone,
    RankEnded,
    RankInexact,
    RankReady,
    RankState,
    Searching,
    Silent,
    Standing,
    StoreOpened,
    Trouble,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog

logger = logging.getLogger(__name__)


class _HangReports:
    """Carries the questions of the hang watch to the nodes, and its stalls to the event log and the terminal."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def ask(self, inquiry: int, ranks: list[int]) -> None:
        """Ask ranks where their main threads stand."""
        roster = self._job.roster
        asked: defaultdict[int, list[int]] = defaultdict(list)
        for number in ranks:
            asked[roster.ranks[number].node.index].append(number)
        for index, numbers in asked.items():
            roster.nodes[index].send(Ask(inquiry, numbers))

    def tell(self, stall: Stall) -> None:
        """Report a stall that is waited for, or that is over."""
        self._job.incidents.emit(
            EventName.STALL,
            "point" if stall.up_to_s else "end",
            ranks=list(stall.ranks),
            seconds=stall.seconds,
            up_to_s=stall.up_to_s,
            step=stall.step,
            places=stall.places,
        )
        self._job.say(str(stall))


@dataclass(frozen=True)
class _Grace:
    """A rank that hung, answered and was asked to leave its block.

    Attributes:
        until_s: when it is killed, on the coordinator's clock.
    """

    until_s: float
    beat: int
    generation: int


class _HangResponse:
    """Opens an incident for each hang that the watch finds, and has ranks killed that do not leave their block.

    Args:
        hangs: the watch over ranks without progress.
    """

    def __init__(self, job: Job, hangs: HangWatch, regrouping: Regrouping, processes: Processes) -> None:
        self._job = job
        self._hangs = hangs
        self._regrouping = regrouping
        self._processes = processes
        self._graces: dict[int, _Grace] = {}  # by rank

    def hear(self, node: Node, message: Silent | Answered) -> None:
        """Pass on which ranks of a node are silent, or where a silent rank stands.

        Raises:
            ValueError: the node does not run one of these ranks.
        """
        job = self._job
        if isinstance(message, Answered):
            rank = job.roster.rank_of(message.rank, node)
            where = Whereabouts(message.in_collective, message.stack, message.is_async, message.launched)
            self._hangs.answered(message.id, rank.number, where)
            return
        for silent in message.ranks:
            job.roster.rank_of(silent.number, node)
        longest_s = job.progress.longest_s if job.progress.are_complete else 0.0
        self._hangs.hear(node.index, message.ranks, longest_s, job.clock())

    def note(self, progress: Progress) -> None:
        """Note whether ranks show progress, and how long they pause outside of steps."""
        self._hangs.shows_progress |= progress.shows
        self._hangs.pause_s = max(self._hangs.pause_s, progress.pause_ms / 1000)

    def look(self, now_s: float) -> None:
        """Look for hangs in a running generation."""
        job = self._job
        running = (rank.number for rank in job.roster.ranks if rank.state is RankState.RUNNING)
        for hang in self._hangs.look(running, now_s):
            if hang.rank is not None:
                job.incidents.emit(EventName.STACK, "point", rank=hang.rank, stack=hang.stack)
            generation = job.generation
            cause = Cause(CauseKind.LOSS, hang.rank, "hang", hang.what, hang.step, who=hang.who)
            self._regrouping.fault(cause, hang.since_s)
            if hang.rank is not None:  # a rank that answers is first asked to leave
                self._graces[hang.rank] = _Grace(now_s + hang.grace_s, hang.beat, generation)

    def kill_those_that_stay(self, now_s: float) -> None:
        """Have the ranks killed that hung and have not left their block in time."""
        for number in [number for number, grace in self._graces.items() if now_s >= grace.until_s]:
            grace, rank = self._graces.pop(number), self._job.roster.ranks[number]
            if rank.state is RankState.LEAVING and grace.generation == self._job.generation:
                self._processes.kill([rank], grace.beat)


_NOTE_PROGRESS_EVERY_S = 60.0  # in the event log, for a look at a run that has not ended


class Coordinator:
    """Regroups the ranks of a job until it is over.

    Args:
        clock: the clock that the times of :meth:`tick` are read from. It should stand still while this process
            does, so that nobody is blamed for a message that this process could not hear.

    Attributes:
        host: the node whose agent runs this coordinator; None if it runs in a separate process.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job = Job(config, events=events, say=say, clock=clock)
        self.nodes, self.spares, self.ranks = job.roster.nodes, job.roster.spares, job.roster.ranks
        self.host: Node | None = None
        self._processes = Processes(job)
        reports = _HangReports(job)
        hangs = HangWatch(config.heartbeat, len(self.ranks), config.nproc_per_node, reports.ask, reports.tell)
        self._regrouping = Regrouping(job, self._processes, hangs)
        self._hangs = _HangResponse(job, hangs, self._regrouping, self._processes)
        self._membership = Membership(job, self._processes, self._regrouping, self._all_nodes_are_here)
        self._bad_devices = BadDevices(job, self._membership, self._processes)
        self._takeover = Takeover(job, self._membership, self._processes, self._regrouping)
        self._note_progress_at_s = clock() + _NOTE_PROGRESS_EVERY_S

    @property
    def phase(self) -> Phase:
        """What the job is doing."""
        return self._job.phase

    @property
    def outcome(self) -> End | None:
        """How the job ended; None as long as it has not."""
        return self._job.outcome

    @property
    def run_id(self) -> str:
        """The job's run ID."""
        return self._job.rendezvous.run_id

    @property
    def generation(self) -> int:
        """The generation that began last (-1: none)."""
        return self._job.generation

    @property
    def inexact(self) -> int:
        """The number of incidents after which the job resumed, and was another one."""
        return self._job.incidents.inexact

    @property
    def high_water(self) -> int:
        """The highest optimizer step that any rank was seen to commit (-1: none)."""
        return self._job.high_water

    def admit(self, index: int, nproc: int, send: Callable[[Command], None]) -> Node:
        """Admit the agent of a node, which must also report that it has joined once it can start processes.

        Args:
            index: the node's number; -1 for a spare, which gets a number when a node is lost.
            send: sends the node a command; it must not call back.

        Returns:
            The node, by which :meth:`hear` and :meth:`lose` know it.

        Raises:
            ValueError: the job has no place for the node; the message says why.
        """
        return self._membership.admit(index, nproc, send)

    def lose(self, node: Node, reason: str, since_s: float | None = None) -> None:
        """Note that the agent of ``node`` cannot be reached; its ranks are dead unless it is expected back.

        Args:
            since_s: when it was heard last, on the monotonic clock (None: it was lost just now).
        """
        self._membership.lose(node, reason, since_s)

    def hear(self, node: Node, message: NodeMessage) -> None:
        """Act on a message from the agent of ``node``.

        Raises:
            ValueError: the message speaks of a rank that the node does not run.
        """
        if self.phase is Phase.OVER:
            if isinstance(message, RankEnded):
                self._job.roster.move(self._job.roster.rank_of(message.rank, node), RankState.GONE)
            return
        match message:
            case Alive():
                pass
            case Joined():
                self._membership.joined(node)
            case Standing():
                self._takeover.standing(node, message)
            case StoreOpened():
                self._on_store(node, message)
            case JobOver(is_lost=True):
                self._regrouping.state_lost(message.generation, message.reason)
            case JobOver():
                self.end(message.code & 0xFF or FAILED, message.reason)
            case Searching():
                node.searching = self.phase is not Phase.JOINING
            case Leaving() if node is self.host:  # and this coordinator ends with it
                self.end(FAILED, message.reason)
            case Leaving():
                self._membership.lose_for_good(node, message.reason)
            case RankInexact():
                rank = self._job.roster.rank_of(message.rank, node)
                self._job.incidents.not_exact(rank.number, message.generation, message.reason)
            case Holding():
                self._bad_devices.note_holding(node, message)
            case Progress():
                self._on_progress(node, message)
            case DeviceBad() if self._job.roster.is_in_place(node):
                self._bad_devices.hear(self._job.roster.rank_of(message.rank, node), message, self.host)
            case DeviceBad():
                logger.info("rank %d: a report of a node that was given up", message.rank)
            case Silent() | Answered():
                self._hangs.hear(node, message)
            case _:
                self._on_rank(self._job.roster.rank_of(message.rank, node), message)

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed."""
        if self.phase is Phase.OVER:
            return
        self._membership.lose_those_that_stay_away(now_s)
        self._regrouping.tick(now_s)
        if self.phase is Phase.RUNNING:
            self._hangs.look(now_s)
            return
        self._hangs.kill_those_that_stay(now_s)
        replace_at_s, gather_by_s = self._job.replace_at_s, self._job.gather_by_s
        if replace_at_s is not None and now_s >= replace_at_s:
            self._job.replace_at_s = None
            self._membership.replace_missing("it did not find the new coordinator")
        elif gather_by_s is not None and now_s >= gather_by_s:
            if self.phase is Phase.JOINING:
                self._end_without_a_node()
            else:
                self._regrouping.too_late(now_s)

    def end(self, code: int, *last_words: str) -> None:
        """End the job, unless it has ended already."""
        self._job.end(code, *last_words)

    def _all_nodes_are_here(self) -> None:
        """Start, or take over, the processes of the job, since all of its nodes have joined."""
        if self.phase is Phase.JOINING:
            self._job.enter(Phase.GATHERING)
            self._job.gather_by_s = self._job.replace_at_s = None
            if self._membership.standings:
                self._takeover.adopt()
        if self.phase is Phase.GATHERING:
            self._processes.start_missing()

    def _end_without_a_node(self) -> None:
        config = self._job.config
        missing = ", ".join(str(index) for index in sorted(self._job.roster.not_joined))
        limit_s = config.regroup_timeout_s if self._membership.standings else config.join_timeout_s
        self.end(FAILED, f"node {missing} did not join the job within {limit_s:g} s")

    def _on_store(self, node: Node, store: StoreOpened) -> None:
        if not self._job.rendezvous.opened(store.generation, node.index, store.address, store.port):
            logger.info("node %d: its store of generation %d is not needed", node.index, store.generation)
            return
        self._processes.store_opened()
        self._regrouping.begin_if_all_are_here()

    def _on_progress(self, node: Node, message: Progress) -> None:
        job = self._job
        if not job.roster.is_in_place(node):
            logger.info("a node without ranks reported their progress")
            return
        self._hangs.note(message)
        job.progress.put(node.index, message)
        job.high_water = max(job.high_water, message.newest)
        if job.phase is not Phase.RUNNING or not job.progress.are_complete:
            return
        self._regrouping.began_after(job.progress.began_after(job.generation))
        now_s = job.clock()
        if now_s >= self._note_progress_at_s:
            self._note_progress_at_s = now_s + _NOTE_PROGRESS_EVERY_S
            job.incidents.emit(EventName.PROGRESS, "point", high_water=job.high_water)
        if job.progress.oldest >= job.target:
            job.roster.fresh.clear()
            job.incidents.recovered(job.high_water)

    def _on_rank(self, rank: Rank, message: RankReady | Trouble | RankEnded | RankDone) -> None:
        if self.phase is Phase.JOINING:
            self._membership.standings.hear(rank, message)
            return
        if not rank.node.joined:
            logger.info("rank %d: %s, of a process that its node has to end", rank.number, message.type)
            return
        if not isinstance(message, RankDone):
            rank.committed, rank.making = message.committed, message.making
        self._job.high_water = max(self._job.high_water, message.committed)
        if isinstance(message, RankReady):
            if message.incarnation == rank.incarnation and self._processes.was_asked_for(rank):
                rank.entered, rank.unfit = message.entered, message.unfit
                self._regrouping.ready(rank)
        elif isinstance(message, RankEnded):
            if message.incarnation == rank.incarnation and rank.state is not RankState.GONE:  # else it is known
                self._regrouping.ended(rank, message)
        elif message.generation != self.generation or rank.state not in (*IN_BLOCK, RankState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", rank.number, message.type, message.generation)
        elif isinstance(message, Trouble):
            self._regrouping.fault(message.cause)
        else:
            self._regrouping.done(rank, message.making if message.making > message.committed else NO_STEP)
