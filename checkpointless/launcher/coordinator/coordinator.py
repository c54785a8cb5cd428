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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from checkpointless.launcher.coordinator.hang_watch import HangWatch, Stall
from checkpointless.launcher.coordinator.job import FAILED, Job, Node, Phase, Rank
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.coordinator.membership import BadDevices, Membership
from checkpointless.launcher.coordinator.moves import Moves, Tell
from checkpointless.launcher.coordinator.regrouping import Processes, Regrouping
from checkpointless.launcher.coordinator.stragglers import StragglerRule
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.messages import (
    IN_BLOCK,
    Alive,
    Answer,
    Barrier,
    DeviceBad,
    Discard,
    Done,
    FaultReport,
    Finish,
    GiveUp,
    Hello,
    Holding,
    Inexact,
    Inquire,
    Joined,
    Leaving,
    MoveNews,
    MoveWanted,
    NodeMessage,
    Offered,
    OpenStore,
    Paces,
    Paused,
    Progress,
    RankEnded,
    RankPace,
    RankStanding,
    RankState,
    Searching,
    Silent,
    Standing,
    StoreOpened,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog

logger = logging.getLogger(__name__)

_BEFORE_THE_BLOCK = (RankState.STARTING, RankState.READY)
_AT_WORK = (*IN_BLOCK, RankState.LEAVING)


class _Takeover:
    """Acts on what nodes report about ranks that run already."""

    def __init__(self, job: Job, membership: Membership, processes: Processes, regrouping: Regrouping) -> None:
        self._job = job
        self._roster = job.roster
        self._membership = membership
        self._processes = processes
        self._regrouping = regrouping

    def standing(self, node: Node, standing: Standing) -> None:
        """Act on what a node reports about its ranks."""
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
        """Return whether a node's ranks, as they were asked for last, wait for a generation that has begun."""
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
                self._roster.move(rank, _assumed(said.state))
                if is_gone and job.phase is not Phase.FINISHING:
                    self._processes.spawn(rank)

    def _compared(self, rank: Rank, said: RankState, was_lost: bool) -> tuple[Rank, _Reunion]:
        return rank, _reunite(_assumed(said) if was_lost else rank.state, said)

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
                rank.node.send(Finish())
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


def _assumed(said: RankState) -> RankState:
    """Return what is known of a rank whose node was declared lost, so that the whole job has to regroup."""
    if said in _AT_WORK:
        return RankState.LEAVING
    return RankState.STARTING if said is RankState.READY else said


def _reunite(known: RankState, said: RankState) -> _Reunion:
    """Return what to do with a rank, of which its node says ``said`` after all else that it had to report."""
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


def _ask(job: Job, inquiry: int, ranks: list[int]) -> None:
    asked: defaultdict[int, list[int]] = defaultdict(list)
    for number in ranks:
        asked[job.roster.ranks[number].node.index].append(number)
    for index, numbers in asked.items():
        job.roster.nodes[index].send(Inquire(inquiry, numbers))


def _report_stall(job: Job, stall: Stall) -> None:
    """Write and print a stall that is waited for."""
    fields = {name: value for name, value in vars(stall).items() if name not in ("ranks", "running")}
    job.incidents.emit(EventName.STALL, "point", ranks=list(stall.ranks), **fields)
    job.say(str(stall))


@dataclass(frozen=True)
class _Grace:
    """A rank that hung, answered and was asked to leave its block."""

    until_s: float
    beat: int
    generation: int


class _HangResponse:
    """Opens an incident for each hang that the watch finds, and has ranks killed that do not leave their block."""

    def __init__(self, job: Job, hangs: HangWatch, regrouping: Regrouping, processes: Processes) -> None:
        self._job = job
        self._hangs = hangs
        self._regrouping = regrouping
        self._processes = processes
        self._graces: dict[int, _Grace] = {}  # by rank

    def hear(self, node: Node, message: Silent | Answer) -> None:
        """Pass on which ranks of a node are silent, or where a silent rank stands."""
        job = self._job
        if isinstance(message, Answer):
            self._hangs.answered(job.roster.rank_of(message.rank, node).number, message)
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


class _Stragglers:
    """Reports slow ranks, each once until it is as fast as others again, or the generation is over.

    ``leave`` is called with each node that a slow rank is on, and the reason.

    How much work the comparison is depends on how many ranks there are, not on how many messages: it is done every
    :attr:`EVERY_S` at most if there are :attr:`MANY` ranks or more, and more often if there are few.
    """

    EVERY_S, MANY = 5.0, 1000

    def __init__(self, job: Job, leave: Callable[[int, str], None]) -> None:
        self._job, self._leave = job, leave
        self._rule = StragglerRule()
        self._generation = NO_STEP
        self._paces: dict[int, RankPace] = {}
        self._is_new = False
        self._every_s = self.EVERY_S * min(1.0, len(job.roster.ranks) / self.MANY)
        self._look_at_s = 0.0

    def hear(self, node: Node, message: Paces) -> None:
        """Keep what a node has reported of its ranks."""
        job = self._job
        if message.generation != job.generation or job.phase is not Phase.RUNNING:
            return
        if self._generation != job.generation:
            self._generation, self._paces = job.generation, {}
            self._are_over(self._rule.forget())
        for pace in message.ranks:
            self._paces[job.roster.rank_of(pace.number, node).number] = pace
        self._is_new = True

    def look(self, now_s: float) -> None:
        """Compare the ranks if there is news of them in this generation, and it is time to."""
        job = self._job
        if not self._is_new or self._generation != job.generation or now_s < self._look_at_s:
            return
        self._is_new, self._look_at_s = False, now_s + self._every_s
        found, over = self._rule.look(self._paces)
        for each in found:
            index = job.roster.ranks[each.rank].node.index
            job.incidents.emit(
                EventName.STRAGGLER,
                "begin",
                rank=each.rank,
                on_node=index,
                step=job.high_water,
                why=each.why,
                own_s=each.own_us / 1e6,
                usual_s=each.usual_us / 1e6,
            )
            job.say(each.line(index))
        on_nodes = {job.roster.ranks[each.rank].node.index: f"rank {each.rank} is slow" for each in found}
        for index, why in on_nodes.items():
            self._leave(index, why)
        self._are_over(over)

    def _are_over(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._job.incidents.emit(EventName.STRAGGLER, "end", rank=rank, step=self._job.high_water)


_WRONG, _TWICE = "CorruptedGradientError", 2


class _Suspects:
    """Moves the node of a rank to a spare that has computed gradients wrongly twice, when training goes on."""

    def __init__(self, job: Job, move: Callable[[int, str, Tell], None]) -> None:
        self._job, self._move = job, move
        self._found: Counter[int] = Counter()
        self._due: set[int] = set()

    def hear(self, cause: Cause) -> None:
        """Note what has interrupted a step, if it was wrong gradients of a rank on one node."""
        if cause.error == _WRONG and cause.rank is not None:
            self._found[cause.rank] += 1
            if self._found[cause.rank] == _TWICE:
                self._due.add(cause.rank)

    def look(self) -> None:
        """Have a node moved, unless the job recovers."""
        incidents = self._job.incidents
        if self._due and incidents.open is None and incidents.recovering is None:
            rank = self._due.pop()
            why = f"rank {rank} has computed gradients wrongly twice"
            self._move(self._job.roster.ranks[rank].node.index, why, partial(self._told, rank))

    def _told(self, rank: int, news: MoveNews) -> None:
        if news.is_moved:
            del self._found[rank]


_NOTE_PROGRESS_EVERY_S = 60.0  # in the event log, for a look at a run that has not ended


class Coordinator:
    """Regroups the ranks of a job until it is over.

    Attributes:
        job: the state of the job; only the parts of the coordinator change it.
        membership: takes nodes in, and hears that their agents cannot be reached.
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
        self.job = job = Job(config, events=events, say=say, clock=clock)
        self.nodes, self.spares, self.ranks = job.roster.nodes, job.roster.spares, job.roster.ranks
        self.host: Node | None = None
        self._processes = Processes(job)
        report = partial(_ask, job), partial(_report_stall, job)
        hangs = HangWatch(config.heartbeat, len(self.ranks), config.nproc_per_node, *report)
        self._regrouping = Regrouping(job, self._processes, hangs, lambda: self._moves.holds_up())
        self._moves = Moves(job, self._processes, self._regrouping)
        self._hangs = _HangResponse(job, hangs, self._regrouping, self._processes)
        self.membership = Membership(
            job, self._processes, self._regrouping, self._all_nodes_are_here, self._moves.lost
        )
        self._bad_devices = BadDevices(job, self.membership, self._processes)
        self._takeover = _Takeover(job, self.membership, self._processes, self._regrouping)
        self._note_progress_at_s = clock() + _NOTE_PROGRESS_EVERY_S
        self._stragglers = _Stragglers(job, self._leave_slow)
        self._suspects = _Suspects(job, self.move)

    def hear(self, node: Node, message: NodeMessage) -> None:
        """Act on a message from the agent of ``node``."""
        if self.job.phase is Phase.OVER:
            if isinstance(message, RankEnded):
                self.job.roster.move(self.job.roster.rank_of(message.rank, node), RankState.GONE)
            return
        if self._moves.hear(node, message, self.host):
            return
        match message:
            case Alive() | MoveWanted() | Paused() | Offered():
                pass
            case Joined():
                self.membership.joined(node)
            case Standing():
                self._takeover.standing(node, message)
            case StoreOpened():
                self._on_store(node, message)
            case GiveUp(is_lost=True):
                self._regrouping.state_lost(message.generation, message.reason)
            case GiveUp():
                self.job.end(message.code & 0xFF or FAILED, message.reason)
            case Searching():
                node.searching = self.job.phase is not Phase.JOINING
            case Leaving() if node is self.host:  # and this coordinator ends with it
                self.job.end(FAILED, message.reason)
            case Leaving():
                self.membership.lose_for_good(node, message.reason)
            case Inexact():
                rank = self.job.roster.rank_of(message.rank, node)
                self.job.incidents.not_exact(rank.number, message.generation, message.reason)
            case Holding():
                self._bad_devices.note_holding(node, message)
            case Progress():
                self._on_progress(node, message)
            case Paces() if self.job.roster.is_in_place(node):
                self._stragglers.hear(node, message)
            case Paces():
                logger.info("a node without ranks reported their paces")
            case DeviceBad() if self.job.roster.is_in_place(node):
                self._bad_devices.hear(self.job.roster.rank_of(message.rank, node), message, self.host)
            case DeviceBad():
                logger.info("rank %d: a report of a node that was given up", message.rank)
            case Silent() | Answer():
                self._hangs.hear(node, message)
            case _:
                self._on_rank(self.job.roster.rank_of(message.rank, node), message)

    def move(self, node: int, why: str, tell: Tell) -> None:
        """Have a spare take the ranks of ``node`` over, or refuse to; ``tell`` hears what becomes of it."""
        self._moves.ask(node, why, tell, self.host)

    def _leave_slow(self, node: int, why: str) -> None:
        if self.job.config.move_stragglers:
            self.move(node, why, lambda news: None)

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed."""
        if self.job.phase is Phase.OVER:
            return
        self.membership.lose_those_that_stay_away(now_s)
        self._regrouping.tick(now_s)
        self._moves.tick(now_s)
        if self.job.phase is Phase.RUNNING:
            self._stragglers.look(now_s)
            self._suspects.look()
            self._hangs.look(now_s)
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
            if self.membership.standings:
                self._takeover.adopt()
        if self.job.phase is Phase.GATHERING:
            self._processes.start_missing()

    def _end_without_a_node(self) -> None:
        config = self.job.config
        missing = ", ".join(str(index) for index in sorted(self.job.roster.not_joined))
        limit_s = config.regroup_timeout_s if self.membership.standings else config.join_timeout_s
        self.job.end(FAILED, f"node {missing} did not join the job within {limit_s:g} s")

    def _on_store(self, node: Node, store: StoreOpened) -> None:
        if not self.job.rendezvous.opened(store.generation, node.index, store.address, store.port):
            logger.info("node %d: its store of generation %d is not needed", node.index, store.generation)
            return
        self._processes.store_opened()
        self._regrouping.begin_if_all_are_here()

    def _on_progress(self, node: Node, message: Progress) -> None:
        job = self.job
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

    def _on_rank(self, rank: Rank, message: Hello | Barrier | FaultReport | RankEnded | Done) -> None:
        if self.job.phase is Phase.JOINING:
            self.membership.standings.hear(rank, message)
            return
        if not rank.node.joined:
            logger.info("rank %d: %s, of a process that its node has to end", rank.number, message.type)
            return
        if not isinstance(message, Done):
            rank.committed, rank.making = message.committed, message.making
        self.job.high_water = max(self.job.high_water, message.committed)
        if isinstance(message, Hello | Barrier):
            if message.incarnation == rank.incarnation and self._processes.was_asked_for(rank):
                rank.entered = isinstance(message, Barrier)
                rank.unfit = message.unfit if isinstance(message, Barrier) else ""
                self._regrouping.ready(rank)
        elif isinstance(message, RankEnded):
            if message.incarnation == rank.incarnation and rank.state is not RankState.GONE:  # else it is known
                self._regrouping.ended(rank, message)
        elif message.generation != self.job.generation or rank.state not in (*IN_BLOCK, RankState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", rank.number, message.type, message.generation)
        elif isinstance(message, FaultReport):
            self._suspects.hear(message.cause)
            self._regrouping.fault(message.cause)
        else:
            self._regrouping.done(rank, message.making if message.making > message.committed else NO_STEP)
