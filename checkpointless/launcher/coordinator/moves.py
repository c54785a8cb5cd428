"""Planned moves: the ranks of a node go on on a spare, while the node still lives, and no step is repeated.

A move has stages. Successors of the node's ranks are started on the spare, and come to their block while training
goes on (*warming*). All ranks agree, in their vote, on a step boundary, and wait there (*pausing*). Once all do,
the generation ends as by a fault, which interrupts nothing (*leaving*). At the barrier the node's ranks offer what
they hold, and the spare takes the node's place: the next generation begins with the successors, which fetch the
state (*filling*). When all ranks have made a step, the old processes end, and the node is idle.

A node that is lost meanwhile is a lost node like any other. Whatever else goes wrong, its ranks stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from checkpointless.launcher.coordinator.job import Job, Node, Phase
from checkpointless.launcher.coordinator.regrouping import Processes, Regrouping
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind, exit_cause
from checkpointless.launcher.protocol.messages import NodeMessage
from checkpointless.observability.telemetry.event_names import EventName, Rung
from checkpointless.system.environment import MASTER_ADDR_ENV, MASTER_PORT_ENV

_OF_THE_STORE = (MASTER_ADDR_ENV, MASTER_PORT_ENV)
Tell = Callable[[messages.MoveNews], None]  # hears what becomes of a move


_GOES_ON = "; training goes on"
_ASK_AGAIN_S = 90.0  # ranks that were asked to pause wait for at most 60 s


class _Stage(Enum):
    WARMING = "successors come to their block"
    PAUSING = "ranks come to a step boundary"
    LEAVING = "ranks come to the barrier, and offer their state"
    FILLING = "successors fetch the state, and all make a step"


@dataclass
class _Move:
    """A move that is not over.

    Attributes:
        node, spare: from where, and to where.
        successors: the incarnation of each of the node's ranks on the spare.
        paused: the ranks that wait at the step boundary in generation ``paused_in``; asked again at ``ask_at_s``.
        asked, offers: the processes that were asked for their state, and what they have answered.
    """

    node: Node
    spare: Node
    why: str  # why it is made, for people
    tell: Tell
    began_s: float
    by_s: float | None  # until when the stage has to be over, on the coordinator's clock (None: training decides)
    origin: int  # that of the job when it began
    stage: _Stage = _Stage.WARMING
    successors: dict[int, int] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)  # the ranks whose successors wait at the entry of their block
    paused: set[int] = field(default_factory=set)
    paused_in: int = NO_STEP
    ask_at_s: float = 0.0
    asked: dict[int, int] = field(default_factory=dict)
    offers: dict[int, messages.Offered] = field(default_factory=dict)
    problem: str = ""  # why the ranks stay after all; they may have agreed on a boundary already


class Moves:
    """Moves the ranks of one node after the other to spares."""

    def __init__(self, job: Job, processes: Processes, regrouping: Regrouping) -> None:
        self._job = job
        self._processes = processes
        self._regrouping = regrouping
        self._move: _Move | None = None

    # ---- what is asked for

    def ask(self, index: int, why: str, tell: Tell) -> None:
        """Have a spare take the ranks of node ``index`` over, or refuse to; ``tell`` hears what becomes of it."""
        job = self._job
        problem = self._obstacle(index)
        spare = self._job.free_spare()
        if not problem and spare is None:
            problem = "no spare is free: start one more agent with --spares, and ask again"
        if problem or spare is None:
            self._say(tell, f"node {index} is not moved: {problem}{_GOES_ON}", is_over=True)
            return
        now_s = job.clock()
        node = self._job.nodes[index]
        spare.is_reserved = True
        self._move = move = _Move(node, spare, why, tell, now_s, now_s + job.config.regroup_timeout_s, job.origin)
        for rank in self._job.ranks_of(node):
            move.successors[rank.number] = rank.incarnation + 1
            env = job.rendezvous.rank_env(rank.number, index)
            env = {name: value for name, value in env.items() if name not in _OF_THE_STORE}  # that of others yet
            spare.send(messages.Spawn(rank.number, rank.incarnation + 1, job.coming, "", env))
        self._say(tell, f"node {index} moves to a spare ({why}): its successors start while training goes on")

    def _obstacle(self, index: int) -> str:
        """Return why node ``index`` cannot be moved now; "" if it can, given a spare."""
        job, nodes = self._job, self._job.nodes
        if not 0 <= index < len(nodes):
            return f"the job has nodes 0 to {len(nodes) - 1}"
        if self._move is not None:
            return f"node {self._move.node.index} is being moved: ask again when that is over"
        if nodes[index] is job.host:
            return (
                "its agent coordinates the job; with `checkpointless coordinator` elsewhere any node can be moved"
            )
        if job.phase is not Phase.RUNNING or job.incidents.open is not None or job.incidents.recovering is not None:
            return "the job is not training, but begins, recovers or ends: ask again when it trains"
        node = nodes[index]
        if node.lost or not node.joined or node.searching or node.is_back or index in self._job.back_by_s:
            return "it is not connected"
        return ""

    # ---- what happens meanwhile

    def hear(self, node: Node, message: NodeMessage) -> bool:
        """Act on a message of a node if it is about a move; return whether it is."""
        move = self._move
        if isinstance(message, messages.MoveWanted):
            if self._job.is_in_place(node):
                index = node.index
                self.ask(index, message.reason, lambda news: self._job.nodes[index].send(news))
        elif isinstance(message, messages.Paused):
            self._paused(message)
        elif isinstance(message, messages.Offered):
            if move is not None and node is move.node and move.asked.get(message.rank) == message.incarnation:
                move.offers[message.rank] = message
                self._regrouping.begin_if_all_are_here()
        elif node not in self._job.spares or getattr(message, "rank", None) is None:
            return False
        elif move is not None and node is move.spare:
            self._of_successor(move, message)
        return True  # of a process whose place another one has taken

    def _of_successor(self, move: _Move, message: NodeMessage) -> None:
        """Act on what has become of a process on the spare that has no place in the job yet."""
        if isinstance(message, messages.Hello) and move.stage is _Stage.WARMING:
            move.here.add(message.rank)
            if len(move.here) == len(move.successors):
                seconds = self._job.clock() - move.began_s
                move.stage, move.by_s = _Stage.PAUSING, None
                here = f"node {move.node.index} has successors on the spare ({seconds:.1f} s)"
                self._say(move.tell, f"{here}: ranks pause at the next step boundary")
        elif isinstance(message, messages.RankEnded):
            ended = exit_cause(message.rank, message.code, NO_STEP, "on the spare")
            self._stay(f"{ended}; its log: {message.log_path}")
        elif isinstance(message, messages.DeviceBad):
            self._stay(f"a device of the spare must not be used: {message.why}")

    def _paused(self, message: messages.Paused) -> None:
        move = self._move
        if move is None or move.stage is not _Stage.PAUSING or message.generation != self._job.generation:
            return
        move.paused.add(message.rank)
        if len(move.paused) == len(self._job.ranks) and self._job.phase is Phase.RUNNING:
            move.stage = _Stage.LEAVING
            why = f"{move.why}, but it stays: {move.problem}" if move.problem else move.why
            step, who = self._job.high_water, f"node {move.node.index}"
            what = "moves to a spare"
            self._regrouping.fault(Cause(CauseKind.PLANNED, None, "planned", what, step, why, who=who))

    def holds_up(self) -> bool:
        """Return whether the next generation has to wait for a move, although all ranks are at the barrier.

        Once the node's ranks have offered their state, the spare takes the node's place.
        """
        move, job = self._move, self._job
        if move is None or move.stage is not _Stage.LEAVING:
            return False
        if move.problem:
            self._end(move.problem + _GOES_ON)
            return False
        ranks = self._job.ranks_of(move.node)
        new = [rank for rank in ranks if move.asked.get(rank.number) != rank.incarnation]
        if new:
            move.by_s = job.gather_by_s = job.clock() + job.config.regroup_timeout_s
            for rank in new:
                move.asked[rank.number] = rank.incarnation
                move.offers.pop(rank.number, None)
            move.node.send(messages.Offer(job.generation, job.high_water, [rank.number for rank in new]))
        if len(move.offers) < len(ranks):
            return True
        problem = next((offer.problem for offer in move.offers.values() if offer.problem), "")
        if problem:
            self._end(f"its state cannot be offered: {problem}{_GOES_ON}")
            return False
        self._swap(move)
        return not job.rendezvous.is_open

    def _swap(self, move: _Move) -> None:
        """Let the spare take the node's place, with the successors, which wait at the barrier."""
        job, index = self._job, move.node.index
        move.stage, move.by_s = _Stage.FILLING, None
        job.spares.remove(move.spare)
        move.spare.is_reserved, move.node.is_reserved = False, True
        move.node.send(messages.Displaced())
        job.spares.append(move.node)  # it hears of the job's end
        job.put_in_place(move.spare, index)
        for rank in job.ranks_of(move.spare):
            rank.incarnation, rank.entered, rank.unfit = move.successors[rank.number], False, ""
            job.fresh.add(rank.number)
        job.rendezvous.sources = {rank: offer.source for rank, offer in move.offers.items() if offer.source}
        job.incidents.step_up(Rung.OWN_STATE, f"a spare takes the place of node {index}")
        job.say(f"a spare takes the place of node {index}, whose ranks hand their state over")
        job.gather_by_s = job.clock() + job.config.regroup_timeout_s
        if job.rendezvous.host == index:
            self._processes.ask_for_store()

    def lost(self, node: Node) -> None:
        """Note that a node is lost, before anything follows from it."""
        move = self._move
        if move is None or move.stage is _Stage.FILLING:
            return  # who has not fetched the state yet has lost it with the node
        if node in (move.node, self._job.nodes[move.node.index]):
            self._end("it was lost")
        elif node is move.spare:
            self._stay("the spare was lost")
        elif self._job.is_in_place(node) and self._job.free_spare() is None:
            self._end(f"node {node.index} was lost, which needs the spare")

    def tick(self, now_s: float) -> None:
        """Act on the time that has passed."""
        move, job = self._move, self._job
        if move is None:
            return
        pauses = move.stage is _Stage.PAUSING and job.phase is Phase.RUNNING
        is_new = pauses and move.paused_in != job.generation
        if move.stage is _Stage.FILLING:
            if job.incidents.open is None and job.incidents.recovering is None:
                self._settle(move)
        elif job.phase is Phase.FINISHING:
            self._end("the ranks' blocks have returned")
        elif job.origin != move.origin:
            self._end("the job begins again")
        elif self._job.nodes[move.node.index] is not move.node and not move.problem:
            self._stay("it lost sight of the coordinator")
        elif is_new and move.problem:
            self._end(move.problem + _GOES_ON)
        elif is_new or (pauses and now_s >= move.ask_at_s):
            if is_new:
                move.paused.clear()
            move.paused_in, move.ask_at_s = job.generation, now_s + _ASK_AGAIN_S
            job.tell_nodes(messages.Pause(job.generation))
        elif move.by_s is not None and now_s >= move.by_s:
            who = "its successors" if move.stage is _Stage.WARMING else "its ranks' state"
            self._stay(f"{who} did not come within {job.config.regroup_timeout_s:g} s")

    # ---- the end

    def _settle(self, move: _Move) -> None:
        """End the processes that have moved, since all ranks have made a step without them."""
        self._job.rendezvous.sources = {}
        move.node.send(messages.Discard(moved=True))
        seconds, step = self._job.clock() - move.began_s, self._job.high_water
        self._move = None
        self._job.incidents.emit(EventName.MOVED, "point", node_number=move.spare.index, seconds=seconds, step=step)
        line = f"node {move.spare.index} has moved to a spare in {seconds:.1f} s: the old node is idle"
        self._say(move.tell, line, is_over=True, is_moved=True)

    def _stay(self, problem: str) -> None:
        """Give the move up; ranks that may have agreed to pause already do so, and go on together."""
        move = self._move
        assert move is not None
        if move.stage is _Stage.PAUSING:
            move.problem = move.problem or problem
            self._job.say(f"node {move.node.index} stays: {problem}")
        else:
            self._end(problem + _GOES_ON)
            self._regrouping.begin_if_all_are_here()

    def _end(self, why: str) -> None:
        move, self._move = self._move, None
        assert move is not None
        move.spare.is_reserved = False
        if not move.spare.lost:
            move.spare.joined = False  # until they have ended
            move.spare.send(messages.Discard(moved=True))
        self._say(move.tell, f"node {move.node.index} was not moved: {why}", is_over=True)

    def _say(self, tell: Tell, line: str, *, is_over: bool = False, is_moved: bool = False) -> None:
        self._job.say(line)
        tell(messages.MoveNews(line, is_over, is_moved))
