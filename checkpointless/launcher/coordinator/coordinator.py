"""The coordinator, which decides for all nodes who takes part, when a generation begins and when the job is over.

It receives messages from the nodes' agents and sends them commands; it knows nothing about processes or about the
connections of ranks. It runs in the loop of an agent or in a separate process. Nothing here blocks.

Here is what follows from a rank without progress (inquiries, reports of stalls, ranks that are made to leave), and
how nodes and their running ranks come (back) under a coordinator that did not see what they did meanwhile: it is
new and takes the whole job over, or a single node had lost sight of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from checkpointless.launcher.coordinator.hang_watch import HangWatch
from checkpointless.launcher.coordinator.job import FAILED, Job, Node, Phase, Rank
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.coordinator.membership import Membership
from checkpointless.launcher.coordinator.moves import Moves
from checkpointless.launcher.coordinator.regrouping import Processes, Regrouping
from checkpointless.launcher.coordinator.stragglers import Stragglers
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind, attribute, exit_cause
from checkpointless.launcher.protocol.messages import IN_BLOCK, NodeMessage, RankState
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog

logger = logging.getLogger(__name__)

_OfRank: TypeAlias = messages.Hello | messages.Barrier | messages.FaultReport | messages.RankEnded | messages.Done
_BEFORE_THE_BLOCK = (RankState.STARTING, RankState.READY)
_AT_WORK = (*IN_BLOCK, RankState.LEAVING)


class _Takeover:
    """Acts on what nodes report about ranks that run already."""

    def __init__(self, job: Job, membership: Membership, processes: Processes, regrouping: Regrouping) -> None:
        self._job = job
        self._membership = membership
        self._processes = processes
        self._regrouping = regrouping
        self._causes: list[Cause] = []
        self._ends: list[messages.RankEnded] = []

    # ---- all nodes, which come to a new coordinator

    def standing(self, node: Node, standing: messages.Standing) -> None:
        job = self._job
        if job.phase is not Phase.JOINING or not job.is_in_place(node):
            self._take_back(node, standing)
            return
        if not job.standings:
            now_s = job.clock()
            job.gather_by_s = now_s + job.config.regroup_timeout_s
            job.replace_at_s = now_s + job.config.node_timeout_s
        job.standings[node.index] = standing
        for said in standing.ranks:
            rank = job.rank_of(said.number, node)
            rank.incarnation, rank.committed, rank.making = said.incarnation, said.committed, said.making
            job.move(rank, said.state)
        self._membership.joined(node)

    def hear(self, rank: Rank, message: _OfRank) -> None:
        """Record what happened to a rank before its own node came, or while other nodes are on their way."""
        if isinstance(message, messages.FaultReport):
            self._causes.append(message.cause)
        elif isinstance(message, messages.RankEnded):
            self._ends.append(message)
            self._job.move(rank, RankState.GONE)
        elif rank.state is not RankState.GONE:  # else no process of it was asked for yet
            self._job.move(rank, RankState.DONE if isinstance(message, messages.Done) else RankState.READY)

    def adopt(self) -> None:
        """Take over the job: all nodes are here, and some run ranks that an earlier coordinator had them start."""
        job, standings = self._job, self._job.standings.values()
        newest = max(standing.generation for standing in standings)
        job.rendezvous.run_id = next(iter(standings)).run_id
        job.high_water = max(*(each.high_water for each in standings), *(rank.committed for rank in job.ranks))
        job.incidents.adopt(newest, max(standing.incident for standing in standings))
        finished = any(each.finished and each.generation == newest for each in standings)
        states = {rank.state for rank in job.ranks}
        if finished and not {RankState.READY, RankState.GONE} <= states:  # nobody is missing in the next block
            failure = self._failure()
            if failure:
                job.end(FAILED, failure)
            self._regrouping.finish()
            self._regrouping.begin_if_all_are_here()
            self._regrouping.check_end()
            return
        cause = self._cause()
        if job.generation < 0:
            job.say("took the job over before it had begun")
            return
        last = max(rank.incarnation for rank in job.ranks)
        for rank in job.ranks:
            if rank.state is RankState.GONE:  # its next process is not its first
                rank.incarnation = last
            elif rank.state is RankState.STARTING:
                job.fresh.add(rank.number)
        job.enter(Phase.RUNNING)
        if cause is None:
            job.incidents.emit(EventName.ADOPT, "point", high_water=job.high_water)
            job.say(f"took the job over in generation {job.generation}: its ranks train undisturbed")
            self._regrouping.finish_if_all_are_done()
        else:
            job.say(f"took the job over in generation {job.generation}: its ranks have to regroup")
            self._regrouping.fault(cause)

    def _failure(self) -> str:
        """Return which rank failed, or which node was lost, after all blocks had returned ("": none)."""
        failed = [exit_cause(end.rank, end.code, NO_STEP) for end in self._ends if end.code != 0]
        absent = self._absent()
        if absent and not failed:
            return f"node {absent[0]} was lost before its ranks had ended (as was the coordinator)"
        return str(attribute(failed)) if failed else ""

    def _cause(self) -> Cause | None:
        """Return why the job has to regroup, or None if all its ranks are in their block and undisturbed."""
        ranks, absent = self._job.ranks, self._absent()
        causes = [exit_cause(end.rank, end.code, end.making) for end in self._ends if not end.forgiven]
        if causes or self._causes:
            return attribute([*self._causes, *causes])
        of = {standing.generation for standing in self._job.standings.values()}
        if len(of) == 1 and all(rank.state in IN_BLOCK for rank in ranks):
            return None
        step = max(rank.making for rank in ranks)
        if absent:
            why = "as was the coordinator"
            return Cause(CauseKind.LOSS, None, "node", "was lost", step, why, who=f"node {absent[0]}")
        gone = next((rank for rank in ranks if rank.state is RankState.GONE), None)
        if gone is not None:
            return Cause(CauseKind.LOSS, gone.number, "exit", "ended while there was no coordinator", step)
        why = "in the middle of an incident"
        return Cause(CauseKind.LOSS, None, "coordinator", "was lost", step, why, who="the coordinator")

    def _absent(self) -> list[int]:
        return sorted({rank.node.index for rank in self._job.ranks} - self._job.standings.keys())

    # ---- one node that comes back

    def _take_back(self, node: Node, standing: messages.Standing) -> None:
        """Take back a node and its ranks after the node or this coordinator had lost sight of the other."""
        job = self._job
        is_known = job.is_in_place(node) and standing.run_id == job.rendezvous.run_id
        missed = is_known and self._missed_the_begin(standing)
        finished = standing.finished and job.phase is not Phase.FINISHING
        is_of_this = is_known and standing.generation == job.generation and not finished
        if not missed and not is_of_this:
            if not node.is_back or self._membership.begin_anew(node, "it came back from another generation"):
                node.send(messages.Discard())  # other processes may have taken the place of its ranks
            return
        was_lost = not node.is_back
        node.is_back, node.joined = False, True
        self._job.not_joined.discard(node.index)
        kept = "and has to regroup with the others" if was_lost else "and nobody had missed it"
        job.say(f"node {node.index} is back with its ranks, {kept}")
        job.incidents.emit(EventName.BACK, "point", node_number=node.index, was_lost=was_lost)
        ranks = self._all_of(node, standing)
        self._record(node, ranks, was_lost)
        if missed and job.phase is Phase.RUNNING:
            what = f"did not hear that generation {job.generation} began"
            step = max(said.making for said in ranks)
            self._regrouping.fault(Cause(CauseKind.LOSS, None, "node", what, step, who=f"node {node.index}"))
        self._start_missing()  # first, since ranks without a process would pass for ranks that have ended
        views = []
        for said in ranks:
            rank = job.ranks[said.number]
            views.append((rank, _assumed(said.state) if was_lost else rank.state, said.state))
        for view in sorted(views, key=lambda view: view[2] is RankState.READY):  # the last may begin a generation
            self._reunite(*view)
        if job.outcome is not None:
            return
        rendezvous = job.rendezvous
        if rendezvous.host == node.index and not rendezvous.is_open and job.phase is not Phase.RUNNING:
            node.send(messages.OpenStore(rendezvous.generation))
        self._start_missing()
        self._regrouping.begin_if_all_are_here()

    def _start_missing(self) -> None:
        """Start the ranks of nodes that have come meanwhile, if no node is missing any more."""
        if not self._job.not_joined and self._job.phase is Phase.GATHERING:
            self._processes.start_missing()

    def _missed_the_begin(self, standing: messages.Standing) -> bool:
        """Return whether a node's ranks, as they were asked for last, wait for a generation that has begun."""
        wait = all(
            said.state is RankState.GONE
            or (said.state in _BEFORE_THE_BLOCK and said.incarnation == self._job.ranks[said.number].incarnation)
            for said in standing.ranks
            if 0 <= said.number < len(self._job.ranks)
        )
        return standing.generation < self._job.generation and wait

    def _all_of(self, node: Node, standing: messages.Standing) -> list[messages.RankStanding]:
        """Return what all ranks of a node do: the command to start those that it does not know was lost."""
        named = {said.number for said in standing.ranks}
        unknown = (rank for rank in self._job.ranks_of(node) if rank.number not in named)
        return standing.ranks + [
            messages.RankStanding(rank.number, rank.incarnation, RankState.GONE, rank.committed, rank.making)
            for rank in unknown
        ]

    def _record(self, node: Node, ranks: Sequence[messages.RankStanding], was_lost: bool) -> None:
        """Record what a node says of its ranks, and replace those that ended while it was declared lost."""
        job = self._job
        for said in ranks:
            rank, is_gone = self._job.rank_of(said.number, node), said.state is RankState.GONE
            if not is_gone:
                rank.incarnation = said.incarnation
            rank.committed, rank.making = said.committed, said.making
            job.high_water = max(job.high_water, said.committed)
            if was_lost:
                self._job.move(rank, _assumed(said.state))
                if is_gone and job.phase is not Phase.FINISHING:
                    self._processes.spawn(rank)

    def _reunite(self, rank: Rank, known: RankState, said: RankState) -> None:
        """Make this coordinator's view of a rank agree with what its node says after all that it had to report.

        Each has seen only its own side: a message was not heard, or a command did not arrive.
        """
        if known is said:
            return
        if said is RankState.GONE and known is RankState.STARTING:
            self._job.move(rank, RankState.GONE)
            self._processes.spawn(rank)
        elif said is RankState.GONE:
            self._ended(rank)
        elif said is RankState.READY:
            self._regrouping.ready(rank)
        elif known in (RankState.LEAVING, RankState.STARTING) and said in IN_BLOCK:
            rank.node.send(self._regrouping.interruption())
        elif known is RankState.FINISHED and said in IN_BLOCK:
            rank.node.send(messages.Finish())
        elif known is RankState.RUNNING and said is RankState.DONE:
            self._regrouping.done(rank)

    def _ended(self, rank: Rank) -> None:
        """Act on the end of a rank's process that this coordinator did not hear of."""
        job = self._job
        has_finished = job.phase is Phase.FINISHING and rank.state is not RankState.READY
        if not has_finished and job.outcome is None:
            what = "ended while its node looked for the coordinator"
            self._regrouping.fault(Cause(CauseKind.LOSS, rank.number, "exit", what, rank.making))
        self._job.move(rank, RankState.GONE)
        if has_finished:
            self._regrouping.check_end()
        elif job.outcome is None:
            self._processes.spawn(rank)


def _assumed(said: RankState) -> RankState:
    """Return what is known of a rank whose node was declared lost, so that the whole job has to regroup."""
    if said in _AT_WORK:
        return RankState.LEAVING
    return RankState.STARTING if said is RankState.READY else said


_NOTE_PROGRESS_EVERY_S = 60.0  # in the event log, for a look at a run that has not ended


class Coordinator:
    """Regroups the ranks of a job until it is over; only its parts change the state in ``job``."""

    def __init__(
        self,
        config: JobConfig,
        *,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job = job = Job(config, events=events, say=say, clock=clock)
        self.nodes, self.spares, self.ranks = job.nodes, job.spares, job.ranks
        self._processes = Processes(job)
        self._hangs = HangWatch(job)
        self._regrouping = Regrouping(job, self._processes, self._hangs, lambda: self.moves.holds_up())
        self.moves = Moves(job, self._processes, self._regrouping)
        self.membership = Membership(
            job, self._processes, self._regrouping, self._all_nodes_are_here, self.moves.lost
        )
        self._takeover = _Takeover(job, self.membership, self._processes, self._regrouping)
        self._note_progress_at_s = clock() + _NOTE_PROGRESS_EVERY_S
        self._stragglers = Stragglers(job, self.moves.ask)
        self._wrong: Counter[int] = Counter()  # how often a rank has computed gradients wrongly on its node
        self._suspects: set[int] = set()

    def hear(self, node: Node, message: NodeMessage) -> None:
        """Act on a message from the agent of ``node``."""
        if self.job.phase is Phase.OVER:
            if isinstance(message, messages.RankEnded):
                self.job.move(self.job.rank_of(message.rank, node), RankState.GONE)
            return
        if self.moves.hear(node, message):
            return
        match message:
            case messages.Alive() | messages.MoveWanted() | messages.Paused() | messages.Offered():
                pass
            case messages.Joined():
                self.membership.joined(node)
            case messages.Standing():
                self._takeover.standing(node, message)
            case messages.StoreOpened():
                self._on_store(node, message)
            case messages.GiveUp(is_lost=True):
                self._regrouping.state_lost(message.generation, message.reason)
            case messages.GiveUp():
                self.job.end(message.code & 0xFF or FAILED, message.reason)
            case messages.Searching():
                node.searching = self.job.phase is not Phase.JOINING
            case messages.Leaving() if node is self.job.host:  # and this coordinator ends with it
                self.job.end(FAILED, message.reason)
            case messages.Leaving():
                self.membership.lose_for_good(node, message.reason)
            case messages.Inexact():
                rank = self.job.rank_of(message.rank, node)
                self.job.incidents.not_exact(rank.number, message.generation, message.reason)
            case messages.Holding() if self.job.is_in_place(node):
                for rank, shard in zip(self.job.ranks_of(node), message.shards):
                    rank.shard = shard
            case messages.Progress() if self.job.is_in_place(node):
                self._on_progress(node, message)
            case messages.Paces() if self.job.is_in_place(node):
                self._stragglers.hear(node, message)
            case messages.DeviceBad() if self.job.is_in_place(node):
                self.membership.bad_device(self.job.rank_of(message.rank, node), message)
            case messages.Holding() | messages.Progress() | messages.Paces() | messages.DeviceBad():
                logger.info("%s of a node without ranks", message.type)
            case messages.Silent() | messages.Answer():
                self._hangs.hear(node, message)
            case _:
                self._on_rank(self.job.rank_of(message.rank, node), message)

    def _leave_wrong(self) -> None:
        """Have the node of a rank moved that has computed gradients wrongly twice, unless the job recovers."""
        incidents = self.job.incidents
        if self._suspects and incidents.open is None and incidents.recovering is None:
            rank = self._suspects.pop()

            def hear(news: messages.MoveNews) -> None:
                if news.is_moved:
                    del self._wrong[rank]

            why = f"rank {rank} has computed gradients wrongly twice"
            self.moves.ask(self.ranks[rank].node.index, why, hear)

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed."""
        if self.job.phase is Phase.OVER:
            return
        self.membership.lose_those_that_stay_away(now_s)
        self._regrouping.tick(now_s)
        self.moves.tick(now_s)
        if self.job.phase is Phase.RUNNING:
            self._stragglers.look(now_s)
            self._leave_wrong()
            self._hangs.look(now_s, self._regrouping.fault)
            return
        self._hangs.kill_those_that_stay(now_s)
        replace_at_s, gather_by_s = self.job.replace_at_s, self.job.gather_by_s
        if replace_at_s is not None and now_s >= replace_at_s:
            self.job.replace_at_s = None
            self.membership.replace_missing("it did not find the new coordinator")
        elif gather_by_s is not None and now_s >= gather_by_s:
            if self.job.phase is Phase.JOINING:
                self._end_without_a_node()
            else:
                self._regrouping.too_late(now_s)

    def _all_nodes_are_here(self) -> None:
        """Start, or take over, the processes of the job, since all of its nodes have joined."""
        if self.job.phase is Phase.JOINING:
            self.job.enter(Phase.GATHERING)
            self.job.gather_by_s = self.job.replace_at_s = None
            if self.job.standings:
                self._takeover.adopt()
        if self.job.phase is Phase.GATHERING:
            self._processes.start_missing()

    def _end_without_a_node(self) -> None:
        config = self.job.config
        missing = ", ".join(str(index) for index in sorted(self.job.not_joined))
        limit_s = config.regroup_timeout_s if self.job.standings else config.join_timeout_s
        self.job.end(FAILED, f"node {missing} did not join the job within {limit_s:g} s")

    def _on_store(self, node: Node, store: messages.StoreOpened) -> None:
        if not self.job.rendezvous.opened(store.generation, node.index, store.address, store.port):
            logger.info("node %d: its store of generation %d is not needed", node.index, store.generation)
            return
        self._processes.store_opened()
        self._regrouping.begin_if_all_are_here()

    def _on_progress(self, node: Node, message: messages.Progress) -> None:
        job = self.job
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
            job.fresh.clear()
            job.incidents.recovered(job.high_water)

    def _on_rank(self, rank: Rank, message: _OfRank) -> None:
        if self.job.phase is Phase.JOINING:
            self._takeover.hear(rank, message)
            return
        if not rank.node.joined:
            logger.info("rank %d: %s, of a process that its node has to end", rank.number, message.type)
            return
        if not isinstance(message, messages.Done):
            rank.committed, rank.making = message.committed, message.making
        self.job.high_water = max(self.job.high_water, message.committed)
        if isinstance(message, messages.Hello | messages.Barrier):
            if message.incarnation == rank.incarnation and self._processes.was_asked_for(rank):
                rank.entered = isinstance(message, messages.Barrier)
                rank.unfit = message.unfit if isinstance(message, messages.Barrier) else ""
                self._regrouping.ready(rank)
        elif isinstance(message, messages.RankEnded):
            if message.incarnation == rank.incarnation and rank.state is not RankState.GONE:  # else it is known
                self._regrouping.ended(rank, message)
        elif message.generation != self.job.generation or rank.state not in (*IN_BLOCK, RankState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", rank.number, message.type, message.generation)
        elif isinstance(message, messages.FaultReport):
            if message.cause.error == "CorruptedGradientError":
                self._wrong[rank.number] += 1
                if self._wrong[rank.number] == 2:
                    self._suspects.add(rank.number)
            self._regrouping.fault(message.cause)
        else:
            self._regrouping.done(rank, message.making if message.making > message.committed else NO_STEP)
