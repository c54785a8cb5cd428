"""The coordinator, which decides for all nodes who takes part, when a generation begins and when the job is over.

It receives messages from the nodes' agents and sends them commands; it knows nothing about processes or about the
connections of ranks. It runs in the loop of an agent or in a separate process. Nothing here blocks.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from checkpointless.coordinator.adoption import Adoption
from checkpointless.coordinator.hang_watch import HangWatch, Stall
from checkpointless.coordinator.hangs import Heartbeat
from checkpointless.coordinator.incident_policy import STILLBORN_LIMIT
from checkpointless.coordinator.incident_tracker import IncidentTracker
from checkpointless.coordinator.rendezvous import Rendezvous
from checkpointless.coordinator.reunion import Reunion, assumed, reunite
from checkpointless.coordinator.roster import NOT_YET, JobProgress, Node, Rank, Roster
from checkpointless.telemetry.events import EventLog
from checkpointless.telemetry.rungs import Rung
from checkpointless.wire.board import NO_STEP
from checkpointless.wire.causes import Cause, CauseKind, culprit, exit_cause
from checkpointless.wire.node_messages import (
    STATES,
    Alive,
    AllDone,
    Answered,
    Ask,
    Begin,
    Command,
    Discard,
    End,
    Interrupt,
    JobOver,
    Joined,
    Kill,
    Leaving,
    NodeMessage,
    OpenStore,
    Progress,
    RankDone,
    RankEnded,
    RankReady,
    Searching,
    Silent,
    Spawn,
    Standing,
    StoreOpened,
    Trouble,
)
from checkpointless.wire.rank_state import COUNTED, IN_BLOCK, RankState

logger = logging.getLogger(__name__)

FAILED = 1  # the exit code whatever the reason, as with torchrun
_NOTE_PROGRESS_EVERY_S = 60.0  # in the event log, for a look at a run that has not ended


@dataclass(frozen=True)
class Limits:
    """The limits that the coordinator enforces on ranks, nodes and incidents.

    Attributes:
        heartbeat: how long a rank in its block may show no progress.
        regroup_timeout_s: how many seconds ranks may take to reach the barrier of an incident.
        max_incidents: how many incidents the job may recover from (None: any number).
        join_timeout_s: how many seconds nodes may take to join the job at its start.
        node_timeout_s: how many seconds the nodes of a running job may take to find this coordinator (again) before
            they count as lost.
    """

    heartbeat: Heartbeat
    regroup_timeout_s: float
    max_incidents: int | None
    join_timeout_s: float = 600.0
    node_timeout_s: float = 10.0


class Coordinator:
    """Regroups the ranks of a job until it is over.

    Args:
        limits: the limits on ranks, nodes and incidents.
        nnodes: how many nodes train.
        nproc: how many ranks each node runs.
        events: the job's event log.
        say: called with lines for the terminal.
        clock: the clock that the times of :meth:`tick` are read from. It should stand still while this process
            does, so that nobody is blamed for a message that this process could not hear.

    Attributes:
        outcome: how the job ended; None as long as it has not.
        nodes: the job's nodes, by number.
        spares: the nodes that wait to take the place of a lost node.
        ranks: the job's ranks, by number.
        host: the node whose agent runs this coordinator; None if it runs in a separate process.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        nnodes: int,
        nproc: int,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.limits = limits
        self.outcome: End | None = None
        self._roster = Roster(nnodes, nproc)
        self.nodes, self.spares, self.ranks = self._roster.nodes, self._roster.spares, self._roster.ranks
        self.host: Node | None = None
        self._rendezvous = Rendezvous(nnodes, nproc)
        self._to_start: list[tuple[Rank, int]] = []  # ranks that wait for a store, with their incarnations
        self._say = say
        self._incidents = IncidentTracker(limits.max_incidents, events, say)
        self._running = False  # from the start of a generation to the fault or end that stops it
        self._target = NO_STEP  # the step after which the recovery is over
        self._gather_by_s: float | None = self._clock() + limits.join_timeout_s
        self._has_started = False  # processes have been requested
        self._finishing = False  # every rank's block has returned
        self._high_water = NO_STEP
        self._note_progress_at_s = self._clock() + _NOTE_PROGRESS_EVERY_S
        self._hangs = HangWatch(limits.heartbeat, nnodes * nproc, nproc, self._inquire, self._tell_stall)
        self._leave_by: dict[int, tuple[float, int]] = {}  # by rank: the deadline, and the beat at which it hung
        self._back_by_s: dict[int, float] = {}  # by node that looks for this coordinator
        self._progress = JobProgress()
        self._adoption = Adoption(self._roster)
        self._replace_at_s: float | None = None  # when the missing nodes of a running job are replaced

    # ---- messages from nodes, and time

    @property
    def generation(self) -> int:
        """The generation that began last (-1: none)."""
        return self._incidents.generation

    @property
    def high_water(self) -> int:
        """The highest optimizer step that any rank was seen to commit (-1: none)."""
        return self._high_water

    def admit(self, index: int, nproc: int, send: Callable[[Command], None]) -> Node:
        """Admit the agent of a node, which must also report that it has joined once it can start processes.

        Args:
            index: the node's number; -1 for a spare, which gets a number when a node is lost.
            nproc: how many ranks the node runs.
            send: sends the node a command; it must not call back.

        Returns:
            The node, by which :meth:`hear` and :meth:`lose` know it.

        Raises:
            ValueError: the job has no place for the node; the message says why.
        """
        wanted = self.nodes[0].nproc
        if nproc != wanted:
            raise ValueError(f"it runs {nproc} ranks, and the nodes of this job run {wanted}")
        if index >= len(self.nodes):
            raise ValueError(f"there is no node {index} in a job of {len(self.nodes)}")
        if self.outcome is not None:
            raise ValueError("the job is over")
        node = Node(index, nproc, send)
        if index < 0:
            self.spares.append(node)
        elif index in self._back_by_s:
            del self._back_by_s[index]
            node.joined, node.is_back = self.nodes[index].joined, True
            self._roster.put_in_place(node, index)
        elif not self.nodes[index].lost:
            raise ValueError(f"node {index} is here already")
        else:
            self._roster.put_in_place(node, index)
        return node

    def lose(self, node: Node, reason: str) -> None:
        """Treat the ranks of ``node`` as dead, because its agent cannot be reached any more."""
        if node.lost:  # it had said that it leaves, and now its connection is closed
            return
        if node.searching and node.index not in self._back_by_s and self._roster.is_in_place(node):
            node.send = _drop
            self._back_by_s[node.index] = self._clock() + self.limits.node_timeout_s
            return
        node.send, node.lost, node.joined = _drop, reason, False
        if node in self.spares:
            self.spares.remove(node)
        if self.outcome is not None or not self._roster.is_in_place(node):
            return
        self._roster.lost.add(node.index)
        self._roster.not_joined.add(node.index)
        self._back_by_s.pop(node.index, None)
        self._progress.drop(node.index)
        self._adoption.drop(node)
        mine = self._roster.ranks_of(node)
        states = {rank.state for rank in mine}
        making = max(rank.making for rank in mine)
        for rank in mine:
            self._roster.move(rank, RankState.GONE)
        if self._finishing:
            if states != {RankState.GONE}:
                self.end(FAILED, f"node {node.index} was lost before its ranks had ended ({reason})")
            self._check_end()
            return
        if self.generation < 0 and self._incidents.open is None and not self._has_started:
            self._say(f"node {node.index} was lost before the job began ({reason})")
        else:
            cause = Cause(CauseKind.LOSS, None, "node", "was lost", making, reason, who=f"node {node.index}")
            self._fault(cause)
            self._incidents.step_up(Rung.NODE, str(cause))
            self._gather_by_s = self._clock() + self.limits.regroup_timeout_s
            if self._rendezvous.host == node.index:
                self._ask_for_store()
        if self.outcome is None:
            self._replace(node)

    def _replace(self, lost: Node) -> None:
        """Have a spare take the place of a lost node, if one is ready."""
        spare = next((each for each in self.spares if each.joined), None)
        if spare is None:
            left_s = (self._gather_by_s or 0.0) - self._clock()
            self._say(f"no spare is ready: waiting up to {max(left_s, 0):.0f} s for another node {lost.index}")
            return
        self.spares.remove(spare)
        self._say(f"a spare takes the place of node {lost.index}")
        self._roster.put_in_place(spare, lost.index)
        self._on_joined(spare)

    def hear(self, node: Node, message: NodeMessage) -> None:
        """Act on a message from the agent of ``node``."""
        if self.outcome is not None:
            if isinstance(message, RankEnded):
                self._roster.move(self._roster.rank_of(message.rank, node), RankState.GONE)
            return
        if isinstance(message, Alive):
            return
        if isinstance(message, Joined):
            self._on_joined(node)
        elif isinstance(message, Standing):
            self._on_standing(node, message)
        elif isinstance(message, StoreOpened):
            self._on_store(node, message)
        elif isinstance(message, JobOver):
            self.end(message.code, message.reason)
        elif isinstance(message, Searching):
            node.searching = self._has_started
        elif isinstance(message, Leaving):
            if node is self.host:  # and this coordinator ends with it
                self.end(FAILED, message.reason)
            else:
                self.lose(node, message.reason)
        elif isinstance(message, Progress):
            self._on_progress(node, message)
        elif isinstance(message, Silent):
            for number, *_ in message.ranks:
                self._roster.rank_of(number, node)
            self._hangs.hear(node.index, message.ranks, self._longest_s(), self._clock())
        elif isinstance(message, Answered):
            rank = self._roster.rank_of(message.rank, node)
            self._hangs.answered(message.id, rank.number, message.in_collective, message.stack)
        else:
            self._on_rank(self._roster.rank_of(message.rank, node), message)

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed.

        Args:
            now_s: the time on the coordinator's clock.
        """
        if self.outcome is not None:
            return
        for index in [index for index, by_s in self._back_by_s.items() if now_s >= by_s]:
            self.lose(self.nodes[index], "it lost sight of the coordinator and did not come back")
        if self._running:
            self._look_for_hangs(now_s)
            return
        for number in [number for number, (by_s, _) in self._leave_by.items() if now_s >= by_s]:
            _, beat = self._leave_by.pop(number)
            if self.ranks[number].state is RankState.LEAVING:
                self._kill([self.ranks[number]], beat)
        if self._replace_at_s is not None and now_s >= self._replace_at_s:
            self._replace_at_s = None
            for index in sorted(self._roster.lost):
                missing = self.nodes[index]
                missing.send, missing.lost = _drop, "it did not find the new coordinator"
                self._replace(missing)
        elif self._gather_by_s is not None and now_s >= self._gather_by_s:
            self._too_late(now_s)

    def end(self, code: int, *last_words: str) -> None:
        """End the job, unless it has ended already."""
        if self.outcome is None:
            self.outcome = End(code, [line for line in last_words if line])
            self._tell_nodes(self.outcome)

    def _on_rank(self, rank: Rank, message: RankReady | Trouble | RankEnded | RankDone) -> None:
        if not self._has_started:
            self._adoption.hear(rank, message)
            return
        if not rank.node.joined:
            logger.info("rank %d: %s, of a process that its node has to end", rank.number, message.type)
            return
        if not isinstance(message, RankDone):
            rank.committed, rank.making = message.committed, message.making
            self._high_water = max(self._high_water, message.committed)
        if isinstance(message, RankReady):
            if message.incarnation == rank.incarnation:
                self._on_ready(rank)
        elif isinstance(message, RankEnded):
            if message.incarnation == rank.incarnation:
                self._on_ended(rank, message)
        elif message.generation != self.generation or rank.state not in (*IN_BLOCK, RankState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", rank.number, message.type, message.generation)
        elif isinstance(message, Trouble):
            self._fault(message.cause)
        elif rank.state is RankState.RUNNING:
            self._roster.move(rank, RankState.DONE)
            if self._roster.all_are(RankState.DONE):
                self._finish()

    def _tell_nodes(self, command: Command) -> None:
        for node in (*self.nodes, *self.spares) if isinstance(command, End) else self.nodes:
            if node.lost != NOT_YET:
                node.send(command)

    # ---- processes

    def _on_joined(self, node: Node) -> None:
        if node.is_back and not self._begin_anew(node, "its agent was started anew"):
            return
        node.joined = True
        if not self._roster.is_in_place(node):
            vacant = next((each for each in self.nodes if each.lost and each.lost != NOT_YET), None)
            if vacant is not None:
                self._replace(vacant)
            return
        self._roster.not_joined.discard(node.index)
        if not self._roster.not_joined:
            if not self._has_started:
                self._has_started, self._gather_by_s, self._replace_at_s = True, None, None
                if self._adoption:
                    self._adopt()
            if self.outcome is None and not self._running and not self._finishing:
                self._start_missing()

    def _start_missing(self) -> None:
        if self._rendezvous.generation != self._coming():
            self._ask_for_store()
        for rank in self.ranks:
            if rank.state is RankState.GONE:
                self._spawn(rank)

    def _ask_for_store(self) -> None:
        """Ask a node, or the first that joins if none is present, to open a store for the coming generation."""
        here = (node for node in self.nodes if node.joined and node.index not in self._back_by_s)
        host = next(here, None)
        self._rendezvous.ask(self._coming() if host else -1, host.index if host else -1)
        if host is not None:
            host.send(OpenStore(self._coming()))

    def _on_store(self, node: Node, store: StoreOpened) -> None:
        if not self._rendezvous.opened(store.generation, node.index, store.address, store.port):
            logger.info("node %d: its store of generation %d is not needed", node.index, store.generation)
            return
        waiting, self._to_start = self._to_start, []
        for rank, incarnation in waiting:
            if rank.state is RankState.STARTING and rank.incarnation == incarnation:
                self._start(rank)
        self._begin_if_all_are_here()

    def _spawn(self, rank: Rank) -> None:
        rank.incarnation += 1
        self._roster.move(rank, RankState.STARTING)
        if self._rendezvous.is_open:
            self._start(rank)
        else:
            self._to_start.append((rank, rank.incarnation))

    def _start(self, rank: Rank) -> None:
        env = self._rendezvous.rank_env(rank.number, rank.node.index)
        incident = self._incidents.open
        rank.node.send(
            Spawn(rank.number, rank.incarnation, self._coming(), incident.id if incident is not None else "", env)
        )

    def _on_ended(self, rank: Rank, ended: RankEnded) -> None:
        was = rank.state
        self._roster.move(rank, RankState.GONE)
        entered = was in COUNTED
        if not entered and (was is RankState.FINISHED or (rank.incarnation == 0 and not ended.forgiven)):
            if ended.code != 0:
                cause = exit_cause(rank.number, ended.code, NO_STEP)
                self.end(FAILED, *ended.last_lines, f"{cause}; its log: {ended.log_path}")
            self._check_end()
            return
        cause = exit_cause(rank.number, ended.code, ended.making)
        if not entered:
            cause = exit_cause(rank.number, ended.code, NO_STEP, "before it entered the block")
        if not ended.forgiven or self._running:
            self._fault(cause)
        incident = self._incidents.open
        if not entered and incident is not None:
            incident.stillborn += 1
            if incident.stillborn >= STILLBORN_LIMIT:
                many = f"{incident.stillborn} successors ended before they entered the block; the last: {cause}"
                self.end(FAILED, *ended.last_lines, many)
        if incident is not None:
            self._incidents.step_up(Rung.PROCESS, str(incident.cause if ended.forgiven else cause))
        if self.outcome is None:
            self._spawn(rank)

    # ---- incidents

    def _fault(self, cause: Cause) -> None:
        """Open an incident, or add ``cause`` to the open one."""
        if self._incidents.open is None:
            self._interrupt(cause)
        self._incidents.add_cause(cause)
        if cause.kind is CauseKind.LOSS:
            give_up = self._incidents.one_too_many(cause, self._high_water)
            if give_up is not None:
                self.end(FAILED, give_up.reason)

    def _interrupt(self, cause: Cause) -> None:
        """Open an incident and interrupt the ranks that are in their block."""
        self._incidents.begin(cause)
        self._hangs.forget()
        if self._running:
            self._running = False
            self._tell_nodes(self._interruption())
            for rank in self.ranks:
                if rank.state in IN_BLOCK:
                    self._roster.move(rank, RankState.LEAVING)
        self._gather_by_s = self._clock() + self.limits.regroup_timeout_s
        if self._rendezvous.generation != self._coming():
            self._ask_for_store()

    def _on_ready(self, rank: Rank) -> None:
        if self._running:
            left = Cause(CauseKind.EXCEPTION, rank.number, "exit", "left the block", NO_STEP)
            self._fault(left)
        self._roster.move(rank, RankState.READY)
        if self._gather_by_s is None:
            self._gather_by_s = self._clock() + self.limits.heartbeat.limit_s
        self._begin_if_all_are_here()
        self._check_end()

    def _begin_if_all_are_here(self) -> None:
        if self._roster.all_are(RankState.READY) and self._rendezvous.is_open and not self._back_by_s:
            self._begin()

    def _too_late(self, now_s: float) -> None:
        late = [rank for rank in self.ranks if rank.state is not RankState.READY]
        lost = [self.nodes[index] for index in sorted(self._roster.lost)]
        if not self._has_started:
            missing = ", ".join(str(index) for index in sorted(self._roster.not_joined))
            limit_s = self.limits.regroup_timeout_s if self._adoption else self.limits.join_timeout_s
            self.end(FAILED, f"node {missing} did not join the job within {limit_s:g} s")
            return
        if lost:
            limit_s = self.limits.regroup_timeout_s
            what = f"node {lost[0].index} was lost ({lost[0].lost})"
            self.end(FAILED, f"{what} and no other took its place within {limit_s:g} s")
            return
        if not self._rendezvous.is_open:
            self.end(
                FAILED, f"node {self._rendezvous.host} opened no store for generation {self._coming()} in time"
            )
            return
        names = "rank " + ", ".join(str(rank.number) for rank in late)
        began = self.generation >= 0
        limit_s = self.limits.regroup_timeout_s if began else self.limits.heartbeat.limit_s
        if self._incidents.open is None:
            what = f"did not enter the block within {limit_s:g} s after the first rank did"
            self._fault(Cause(CauseKind.LOSS, late[0].number, "hang", what, NO_STEP))
        incident = self._incidents.open
        if incident is None or self.outcome is not None:
            return
        if incident.killed_the_late:
            did = "come back" if began else "enter the block"
            self.end(FAILED, f"{names} did not {did} within {limit_s:g} s, also not as a new process")
        else:
            incident.killed_the_late = True
            self._gather_by_s = now_s + limit_s
            self._say(f"incident {incident.id}: {names} did not come back in time and is replaced")
            self._kill(late)

    def _kill(self, ranks: Iterable[Rank], beat: int = -1) -> None:
        for rank in ranks:
            if rank.state is not RankState.GONE:
                rank.node.send(Kill(rank.number, rank.incarnation, self.generation, beat))

    def _begin(self) -> None:
        """Begin a generation, since all ranks are at the barrier."""
        self._look_back()
        incident, give_up = self._incidents.open, self._incidents.gathered(self._high_water)
        if give_up is not None:
            self.end(FAILED, give_up.reason, give_up.last_words.rstrip())
            return
        self._incidents.regrouped(self._coming())
        self._running, self._finishing = True, False
        self._gather_by_s = None
        env = self._rendezvous.go_env()
        for rank in self.ranks:
            self._roster.move(rank, RankState.RUNNING)
        self._hangs.forget()
        self._leave_by.clear()
        self._progress = JobProgress()
        self._tell_nodes(
            Begin(self.generation, incident.id if incident else "", env, self._high_water, self._target)
        )
        self._incidents.emit("go", "point", high_water=self._high_water)

    def _look_back(self) -> None:
        """Determine which step was committed last and which one is next, since all boards have been read."""
        newest = max(rank.committed for rank in self.ranks)
        self._resumed_at(newest)
        making = max(rank.making for rank in self.ranks)
        self._target = max(making, newest + 1) if making != NO_STEP else NO_STEP

    def _resumed_at(self, newest: int) -> None:
        """Note that the job resumes after step ``newest``, since no rank's board shows a later step."""
        if newest < self._high_water:  # every rank is behind what was committed, so storage gave the state
            self._incidents.fell_back(self._high_water, newest)
        self._high_water = newest

    def _on_progress(self, node: Node, message: Progress) -> None:
        self._hangs.shows_progress |= message.shows
        self._hangs.pause_s = max(self._hangs.pause_s, message.pause_ms / 1000)
        self._progress.put(node.index, message)
        self._high_water = max(self._high_water, message.newest)
        if not self._running or len(self._progress) < len(self.nodes):
            return
        self._resumed_at(self._progress.newest)
        now_s = self._clock()
        if now_s >= self._note_progress_at_s:
            self._note_progress_at_s = now_s + _NOTE_PROGRESS_EVERY_S
            self._incidents.emit("progress", "point", high_water=self._high_water)
        if self._progress.oldest >= self._target:
            self._incidents.recovered(self._target, self._high_water)

    def _coming(self) -> int:
        return self.generation + 1

    # ---- hangs

    def _longest_s(self) -> float:
        return self._progress.longest_s if len(self._progress) == len(self.nodes) else 0.0

    def _look_for_hangs(self, now_s: float) -> None:
        running = (rank.number for rank in self.ranks if rank.state is RankState.RUNNING)
        for hang in self._hangs.look(running, now_s):
            if hang.rank is not None:
                self._incidents.emit("stack", "point", rank=hang.rank, stack=hang.stack)
            self._fault(Cause(CauseKind.LOSS, hang.rank, "hang", hang.what, hang.step, who=hang.who))
            if hang.rank is not None:  # a rank that answers is first asked to leave
                self._leave_by[hang.rank] = (now_s + hang.grace_s, hang.beat)

    def _tell_stall(self, stall: Stall) -> None:
        self._incidents.emit(
            "stall",
            "point" if stall.up_to_s else "end",
            ranks=list(stall.ranks),
            seconds=stall.seconds,
            up_to_s=stall.up_to_s,
            step=stall.step,
            places=stall.places,
        )
        self._say(str(stall))

    def _inquire(self, inquiry: int, ranks: list[int]) -> None:
        asked: defaultdict[int, list[list[int]]] = defaultdict(list)
        for number in ranks:
            asked[self.ranks[number].node.index].append([number])
        for index, numbers in asked.items():
            self.nodes[index].send(Ask(inquiry, numbers))

    # ---- a job that is already running

    def _on_standing(self, node: Node, standing: Standing) -> None:
        if self._has_started or not self._roster.is_in_place(node):
            self._on_return(node, standing)
            return
        now_s = self._clock()
        if not self._adoption:
            self._gather_by_s = now_s + self.limits.regroup_timeout_s
            self._replace_at_s = now_s + self.limits.node_timeout_s
        self._adoption.put(node, standing)
        self._on_joined(node)

    def _on_return(self, node: Node, standing: Standing) -> None:
        """Take back a node and its ranks after the node or this coordinator had lost sight of the other."""
        in_place = self._roster.is_in_place(node)
        same = (standing.generation, standing.run_id) == (self.generation, self._rendezvous.run_id)
        if not in_place or not same or standing.finished != self._finishing:
            if not node.is_back or self._begin_anew(node, "it came back from another generation"):
                node.send(Discard())  # other processes may have taken the place of its ranks
            return
        was_lost = not node.is_back
        node.is_back, node.joined = False, True
        self._roster.not_joined.discard(node.index)
        kept = "and has to regroup with the others" if was_lost else "and nobody had missed it"
        self._say(f"node {node.index} is back with its ranks, {kept}")
        self._incidents.emit("back", "point", node_number=node.index, was_lost=was_lost)
        for number, incarnation, state, committed, making in standing.ranks:
            rank, said = self._roster.rank_of(number, node), STATES[state]
            if said is not RankState.GONE:
                rank.incarnation = incarnation
            rank.committed, rank.making = committed, making
            self._high_water = max(self._high_water, committed)
            if was_lost:
                self._roster.move(rank, assumed(said))
                if said is RankState.GONE and not self._finishing:
                    self._spawn(rank)
        for number, _, state, *_ in standing.ranks:
            self._reunite(self.ranks[number], STATES[state], was_lost)
        if self.outcome is not None:
            return
        if self._rendezvous.host == node.index and not self._rendezvous.is_open and not self._running:
            node.send(OpenStore(self._rendezvous.generation))
        if not self._roster.not_joined and not self._running and not self._finishing:
            self._start_missing()  # the ranks of nodes that have come meanwhile
        self._begin_if_all_are_here()

    def _begin_anew(self, node: Node, reason: str) -> bool:
        """Treat the ranks of a node as lost, because it has come back without them.

        Returns:
            Whether the node still has a place in the job.
        """
        send, index, node.is_back = node.send, node.index, False
        self.lose(node, reason)
        if self.outcome is None and self.nodes[index] is node:
            node.send, node.lost = send, ""
            self._roster.put_in_place(node, index)
            return True
        send(self.outcome or End(FAILED, [f"a spare has taken the place of node {index}"]))
        return False

    def _reunite(self, rank: Rank, said: RankState, was_lost: bool) -> None:
        match reunite(assumed(said) if was_lost else rank.state, said):
            case Reunion.READY:
                self._on_ready(rank)
            case Reunion.DONE:
                self._on_rank(rank, RankDone(rank.number, self.generation))
            case Reunion.INTERRUPT:
                rank.node.send(self._interruption())
            case Reunion.START:
                self._roster.move(rank, RankState.GONE)
                self._spawn(rank)
            case Reunion.FINISH:
                rank.node.send(AllDone())
            case Reunion.ENDED if self._finishing:
                self._roster.move(rank, RankState.GONE)
                self._check_end()
            case Reunion.ENDED:
                what = "ended while its node looked for the coordinator"
                self._fault(Cause(CauseKind.LOSS, rank.number, "exit", what, rank.making))
                self._roster.move(rank, RankState.GONE)
                if self.outcome is None:
                    self._spawn(rank)
            case Reunion.AGREED:
                pass

    def _interruption(self) -> Interrupt:
        incident = self._incidents.open
        assert incident is not None
        blamed = culprit(incident.cause)
        return Interrupt(self.generation, incident.id, str(incident.cause), NO_STEP if blamed is None else blamed)

    def _adopt(self) -> None:
        """Take over the job: all nodes are here, and some run ranks that an earlier coordinator had them start."""
        found = self._adoption
        self._rendezvous.run_id = found.run_id
        self._high_water = found.high_water
        self._incidents.adopt(found.generation, found.incidents)
        if found.is_over:
            failure = found.failure()
            if failure is not None:
                self.end(FAILED, str(failure))
            self._finish()
            self._check_end()
            return
        cause = found.cause()
        if self.generation < 0:
            self._say("took the job over before it had begun")
            return
        newest = max(rank.incarnation for rank in self.ranks)
        for rank in self.ranks:
            if rank.state is RankState.GONE:  # its next process is not its first
                rank.incarnation = newest
        if cause is None:
            self._running = True
            self._incidents.emit("adopt", "point", high_water=self._high_water)
            self._say(f"took the job over in generation {self.generation}: its ranks train undisturbed")
            if self._roster.all_are(RankState.DONE):
                self._finish()
        else:
            self._say(f"took the job over in generation {self.generation}: its ranks have to regroup")
            self._running = True
            self._fault(cause)

    # ---- the end

    def _finish(self) -> None:
        self._running, self._finishing = False, True
        self._incidents.recovered(self._target, self._high_water)
        for rank in self.ranks:
            if rank.state is not RankState.GONE:
                self._roster.move(rank, RankState.FINISHED)
        self._tell_nodes(AllDone())

    def _check_end(self) -> None:
        if self._roster.in_state[RankState.GONE] <= len(self._roster.not_joined) * self.nodes[0].nproc:
            return  # only the ranks of nodes that are lost or not ready yet are gone
        if self._roster.all_are(RankState.GONE):
            self.end(0)
        elif self._roster.in_state[RankState.READY]:
            gone = next(rank for rank in self.ranks if rank.state is RankState.GONE and rank.node.joined)
            waiting = next(rank for rank in self.ranks if rank.state is RankState.READY)
            self.end(
                FAILED, f"rank {gone.number} ended without entering the block that rank {waiting.number} waits in"
            )


def _drop(command: Command) -> None:
    logger.info("%r is for a node that is lost", command.type)
