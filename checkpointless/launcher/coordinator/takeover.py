"""How nodes and their running ranks come (back) under a coordinator that did not see what they did meanwhile.

Either this coordinator is new and takes the whole job over, or a single node had lost sight of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from checkpointless.launcher.coordinator.job import FAILED, Job, Phase
from checkpointless.launcher.coordinator.membership import Membership
from checkpointless.launcher.coordinator.processes import Processes
from checkpointless.launcher.coordinator.regrouping import Regrouping
from checkpointless.launcher.coordinator.roster import Node, Rank
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.node_messages import (
    IN_BLOCK,
    AllDone,
    Discard,
    OpenStore,
    RankStanding,
    RankState,
    Standing,
)
from checkpointless.observability.telemetry.event_names import EventName

_BEFORE_THE_BLOCK = (RankState.STARTING, RankState.READY)
_AT_WORK = (*IN_BLOCK, RankState.LEAVING)


class Takeover:
    """Acts on what nodes report about ranks that run already."""

    def __init__(
        self,
        job: Job,
        membership: Membership,
        processes: Processes,
        regrouping: Regrouping,
    ) -> None:
        self._job = job
        self._roster = job.roster
        self._membership = membership
        self._processes = processes
        self._regrouping = regrouping

    def standing(self, node: Node, standing: Standing) -> None:
        """Act on what a node reports about its ranks.

        Raises:
            ValueError: the node does not run one of these ranks.
        """
        job = self._job
        if job.phase is not Phase.JOINING or not self._roster.is_in_place(node):
            self._take_back(node, standing)
            return
        now_s = job.clock()
        if not self._membership.standings:
            job.gather_by_s = now_s + job.config.regroup_timeout_s
            job.replace_at_s = now_s + job.config.node_timeout_s
        self._membership.standings.put(node, standing)
        self._membership.joined(node)

    def adopt(self) -> None:
        """Take over the job: all nodes are here, and some run ranks that an earlier coordinator had them start."""
        job, found = self._job, self._membership.standings
        job.rendezvous.run_id = found.run_id
        job.high_water = found.high_water
        job.incidents.adopt(found.generation, found.incidents)
        if found.is_over:
            failure = found.failure()
            if failure:
                job.end(FAILED, failure)
            self._regrouping.finish()
            self._regrouping.begin_if_all_are_here()
            self._regrouping.check_end()
            return
        cause = found.cause()
        if job.generation < 0:
            job.say("took the job over before it had begun")
            return
        newest = max(rank.incarnation for rank in self._roster.ranks)
        for rank in self._roster.ranks:
            if rank.state is RankState.GONE:  # its next process is not its first
                rank.incarnation = newest
            elif rank.state is RankState.STARTING:
                self._roster.fresh.add(rank.number)
        job.enter(Phase.RUNNING)
        if cause is None:
            job.incidents.emit(EventName.ADOPT, "point", high_water=job.high_water)
            job.say(f"took the job over in generation {job.generation}: its ranks train undisturbed")
            self._regrouping.finish_if_all_are_done()
        else:
            job.say(f"took the job over in generation {job.generation}: its ranks have to regroup")
            self._regrouping.fault(cause)

    # ---- one node that comes back

    def _take_back(self, node: Node, standing: Standing) -> None:
        """Take back a node and its ranks after the node or this coordinator had lost sight of the other."""
        job = self._job
        is_known = self._roster.is_in_place(node) and standing.run_id == job.rendezvous.run_id
        missed = is_known and self._missed_the_begin(standing)
        if not missed and not (is_known and self._is_of_this_generation(standing)):
            if not node.is_back or self._membership.begin_anew(node, "it came back from another generation"):
                node.send(Discard())  # other processes may have taken the place of its ranks
            return
        was_lost = not node.is_back
        node.is_back, node.joined = False, True
        self._roster.not_joined.discard(node.index)
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
        found = [self._compared(self._roster.ranks[said.number], said.state, was_lost) for said in ranks]
        for rank, reunion in sorted(found, key=_is_ready):  # the last one may begin the next generation
            self._reunite(rank, reunion)
        if job.outcome is not None:
            return
        rendezvous = job.rendezvous
        if rendezvous.host == node.index and not rendezvous.is_open and job.phase is not Phase.RUNNING:
            node.send(OpenStore(rendezvous.generation))
        self._start_missing()
        self._regrouping.begin_if_all_are_here()

    def _start_missing(self) -> None:
        """Start the ranks of nodes that have come meanwhile, if no node is missing any more."""
        if not self._roster.not_joined and self._job.phase is Phase.GATHERING:
            self._processes.start_missing()

    def _is_of_this_generation(self, standing: Standing) -> bool:
        finished = standing.finished and self._job.phase is not Phase.FINISHING
        return standing.generation == self._job.generation and not finished

    def _missed_the_begin(self, standing: Standing) -> bool:
        """Return whether the ranks of a node still wait at the barrier for a generation that has begun.

        They must be the processes that were asked for last, and not those of a node whose place another one had.
        """
        wait = all(
            said.state is RankState.GONE
            or (said.state in _BEFORE_THE_BLOCK and said.incarnation == self._roster.ranks[said.number].incarnation)
            for said in standing.ranks
            if 0 <= said.number < len(self._roster.ranks)
        )
        return standing.generation < self._job.generation and wait

    def _all_of(self, node: Node, standing: Standing) -> list[RankStanding]:
        """Return what all ranks of a node do: the command to start those that it does not know was lost."""
        named = {said.number for said in standing.ranks}
        unknown = (rank for rank in self._roster.ranks_of(node) if rank.number not in named)
        return standing.ranks + [
            RankStanding(rank.number, rank.incarnation, RankState.GONE, rank.committed, rank.making)
            for rank in unknown
        ]

    def _record(self, node: Node, ranks: Sequence[RankStanding], was_lost: bool) -> None:
        """Record what a node says of its ranks, and replace those that ended while it was declared lost."""
        job = self._job
        for said in ranks:
            rank, is_gone = self._roster.rank_of(said.number, node), said.state is RankState.GONE
            if not is_gone:
                rank.incarnation = said.incarnation
            rank.committed, rank.making = said.committed, said.making
            job.high_water = max(job.high_water, said.committed)
            if was_lost:
                self._roster.move(rank, assumed(said.state))
                if is_gone and job.phase is not Phase.FINISHING:
                    self._processes.spawn(rank)

    def _compared(self, rank: Rank, said: RankState, was_lost: bool) -> tuple[Rank, _Reunion]:
        return rank, _reunite(assumed(said) if was_lost else rank.state, said)

    def _reunite(self, rank: Rank, reunion: _Reunion) -> None:
        """Make this coordinator's view of a rank and its node's view agree."""
        match reunion:
            case _Reunion.READY:
                self._regrouping.ready(rank)
            case _Reunion.DONE:
                self._regrouping.done(rank)
            case _Reunion.INTERRUPT:
                rank.node.send(self._regrouping.interruption())
            case _Reunion.START:
                self._roster.move(rank, RankState.GONE)
                self._processes.spawn(rank)
            case _Reunion.FINISH:
                rank.node.send(AllDone())
            case _Reunion.ENDED:
                self._ended(rank)
            case _Reunion.AGREED:
                pass

    def _ended(self, rank: Rank) -> None:
        """Act on the end of a rank's process that this coordinator did not hear of."""
        job = self._job
        has_finished = job.phase is Phase.FINISHING and rank.state is not RankState.READY
        if not has_finished and job.outcome is None:
            what = "ended while its node looked for the coordinator"
            self._regrouping.fault(Cause(CauseKind.LOSS, rank.number, "exit", what, rank.making))
        self._roster.move(rank, RankState.GONE)
        if has_finished:
            self._regrouping.check_end()
        elif job.outcome is None:
            self._processes.spawn(rank)


def _is_ready(found: tuple[Rank, _Reunion]) -> bool:
    return found[1] is _Reunion.READY


class _Reunion(Enum):
    """What it takes to make both views of a rank agree: coordinator and node saw only their own side."""

    AGREED = "nothing"
    READY = "it is at the barrier, and that was not heard"
    DONE = "its block returned, and that was not heard"
    ENDED = "its process has ended, and that was not heard"
    START = "it has to be started: the command did not arrive"
    INTERRUPT = "it has to leave its block: the command did not arrive"
    FINISH = "all are done: the command did not arrive"


def assumed(said: RankState) -> RankState:
    """Return what is known of a rank whose node was declared lost, so that the whole job has to regroup."""
    if said in _AT_WORK:
        return RankState.LEAVING
    return RankState.STARTING if said is RankState.READY else said


def _reunite(known: RankState, said: RankState) -> _Reunion:
    """Return what to do with one rank.

    Args:
        said: the rank's state as its node reports it, after everything else that the node had to report.
    """
    if known is said:
        return _Reunion.AGREED
    if said is RankState.GONE:
        return _Reunion.START if known is RankState.STARTING else _Reunion.ENDED
    if said is RankState.READY:
        return _Reunion.READY
    if known in (RankState.LEAVING, RankState.STARTING) and said in IN_BLOCK:
        return _Reunion.INTERRUPT
    if known is RankState.FINISHED and said in IN_BLOCK:
        return _Reunion.FINISH
    if known is RankState.RUNNING and said is RankState.DONE:
        return _Reunion.DONE
    return _Reunion.AGREED
