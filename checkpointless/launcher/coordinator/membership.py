"""Which nodes belong to a job: those that join it, are lost, come back or take the place of a lost one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from checkpointless.launcher.coordinator.job import FAILED, NOT_YET, Job, Node, Phase, Rank
from checkpointless.launcher.coordinator.regrouping import Processes, Regrouping
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.messages import Command, DeviceBad, End, RankState
from checkpointless.observability.telemetry.event_names import EventName, Rung

logger = logging.getLogger(__name__)


class Membership:
    """Admits nodes to a job, and replaces those that are lost.

    ``on_loss`` is called with a node that is lost, before anything follows from that.
    """

    def __init__(
        self,
        job: Job,
        processes: Processes,
        regrouping: Regrouping,
        on_complete: Callable[[], None],
        on_loss: Callable[[Node], None],
    ) -> None:
        self._job = job
        self._processes = processes
        self._regrouping = regrouping
        self._on_complete = on_complete
        self._on_loss = on_loss

    def admit(self, index: int, nproc: int, send: Callable[[Command], None]) -> Node:
        """Admit the agent of node ``index`` (-1: of a spare), which has joined once it can start ranks.

        ``send`` sends it a command, and must not call back. A ``ValueError`` says why the job has no place for it.
        """
        job = self._job
        wanted = job.nodes[0].nproc
        if nproc != wanted:
            raise ValueError(f"it runs {nproc} ranks, and the nodes of this job run {wanted}")
        if index >= len(job.nodes):
            raise ValueError(f"there is no node {index} in a job of {len(job.nodes)}")
        if self._job.phase is Phase.OVER:
            raise ValueError("the job is over")
        node = Node(index, nproc, send)
        if index < 0:
            job.spares.append(node)
        elif index in job.back_by_s:
            node.back_by_s = job.back_by_s.pop(index)
            node.joined, node.is_back = job.nodes[index].joined, True
            node.tried = job.nodes[index].tried
            node.speaks_by_s = self._job.clock() + self._job.config.regroup_timeout_s
            job.put_in_place(node, index)
        elif not job.nodes[index].lost:
            raise ValueError(f"node {index} is here already")
        else:
            job.put_in_place(node, index)
        return node

    def joined(self, node: Node) -> None:
        """Note that the agent of ``node`` can start processes."""
        if node.is_back and not self.begin_anew(node, "its agent was started anew"):
            return
        node.joined = True
        if not self._job.is_in_place(node):
            vacant = (each for each in self._job.nodes if each.lost and each.lost != NOT_YET)
            if self._job.replace_at_s is None and (lost := next(vacant, None)) is not None:
                self._replace(lost)
            return
        self._job.not_joined.discard(node.index)
        if not self._job.not_joined:
            self._on_complete()

    def lose(self, node: Node, reason: str, since_s: float | None = None) -> None:
        """Note that the agent of ``node`` cannot be reached since ``since_s`` on the monotonic clock (None: now).

        Its ranks are dead unless it is expected back.
        """
        job = self._job
        if not self._comes_back(node):
            self.lose_for_good(node, reason, since_s)
        elif node.index not in job.back_by_s:
            by_s = node.back_by_s if node.is_back else job.clock() + job.config.node_timeout_s
            job.back_by_s[node.index] = by_s
            node.send, node.is_back = _drop, False

    def lose_for_good(self, node: Node, reason: str, since_s: float | None = None) -> None:
        """Treat the ranks of ``node`` as dead, since the monotonic time ``since_s`` (None: since now)."""
        if node.lost:  # it had said that it leaves, and now its connection is closed
            return
        job = self._job
        node.send, node.lost, node.joined, node.is_back = _drop, reason, False, False
        if node in job.spares:
            job.spares.remove(node)
        if job.phase is Phase.OVER:
            return
        self._on_loss(node)
        if not job.is_in_place(node):
            return
        job.not_joined.add(node.index)
        job.back_by_s.pop(node.index, None)
        job.progress.drop(node.index)
        job.standings.pop(node.index, None)
        self._lose_ranks(node, reason, since_s)

    def bad_device(self, rank: Rank, message: DeviceBad) -> None:
        """Act on a report of a device that must not be used.

        The node is given up whole, for a spare, since ranks belong to nodes; so its other ranks lose what they
        hold. That costs only time if every shard of the node has another holder elsewhere. If one has not, the
        device is tried once first: the rank is started on it all the same. That is also done as long as there is no
        spare, and on the node that runs the coordinator.
        """
        job, node = self._job, rank.node
        is_meant = rank.state is RankState.STARTING and rank.incarnation == message.incarnation
        if not is_meant or job.phase is not Phase.GATHERING:
            return
        tried, tried_after = node.tried.get(rank.number, (-1, -1))
        if tried == message.incarnation:
            self._processes.start_anyway(rank)  # the answer may be lost, and one that comes twice is ignored
            return
        was_tried = tried >= 0 and job.high_water <= tried_after  # no step was committed since
        can_go = was_tried or not _is_last_holder(node, job.ranks, job.fresh)
        gives_up = can_go and node is not job.host and job.free_spare() is not None
        why = f"the device of rank {rank.number} must not be used: {message.why}"
        remedy = "give_up" if gives_up else "try"
        about: dict[str, Any] = {"node_number": node.index, "why": message.why, "remedy": remedy}
        job.incidents.emit(EventName.BAD_DEVICE, "point", rank=rank.number, **about)
        if gives_up:
            job.say(f"node {node.index} is given up for a spare: {why}")
            node.send(End(FAILED, [why]))
            self.lose_for_good(node, why)
        else:
            node.tried[rank.number] = message.incarnation, job.high_water
            todo = "is started on it once more" if tried < 0 else "is started on it again: add a spare node"
            job.say(f"node {node.index} cannot be given up: {why}; rank {rank.number} {todo}")
            self._processes.start_anyway(rank)

    def lose_those_that_stay_away(self, now_s: float) -> None:
        """Treat nodes as lost that looked for this coordinator and have not come back, or not spoken, in time."""
        for index in [index for index, by_s in self._job.back_by_s.items() if now_s >= by_s]:
            self.lose_for_good(self._job.nodes[index], "it lost sight of the coordinator and did not come back")
        for node in [node for node in self._job.nodes if node.is_back and now_s >= node.speaks_by_s]:
            self.begin_anew(node, "it came back and did not say what its ranks do")

    def replace_missing(self, why: str) -> None:
        """Have spares take the places of all nodes that are not here; ``why`` they are not is for people."""
        for missing in [node for node in self._job.nodes if node.lost]:
            missing.send, missing.lost = _drop, why
            self._replace(missing)

    def begin_anew(self, node: Node, reason: str) -> bool:
        """Treat a node's ranks as lost, as it came back without them; return whether it still has a place."""
        send, index = node.send, node.index
        self.lose_for_good(node, reason)
        if self._job.outcome is None and self._job.nodes[index] is node:
            node.send, node.lost = send, ""
            self._job.put_in_place(node, index)
            return True
        send(self._job.outcome or End(FAILED, [f"a spare has taken the place of node {index}"]))
        return False

    def _comes_back(self, node: Node) -> bool:
        """Return whether a node whose connection is lost is expected back with its ranks, which go on meanwhile.

        This holds for a node that looks for this coordinator, and when all that is left is to hear how ranks ended.
        """
        if node.lost or not node.joined or not self._job.is_in_place(node):
            return False
        return node.is_back or node.searching or self._job.phase is Phase.FINISHING

    def _lose_ranks(self, node: Node, reason: str, since_s: float | None) -> None:
        job, mine = self._job, self._job.ranks_of(node)
        states = {rank.state for rank in mine}
        making = max(rank.making for rank in mine)
        for rank in mine:
            self._job.move(rank, RankState.GONE)
        if job.phase is Phase.FINISHING:
            if states != {RankState.GONE}:
                job.end(FAILED, f"node {node.index} was lost before its ranks had ended ({reason})")
            self._regrouping.check_end()
            return
        if job.phase is Phase.JOINING:
            job.say(f"node {node.index} was lost before the job began ({reason})")
            if job.standings or job.replace_at_s is not None:
                job.replace_at_s = job.clock() + job.config.node_timeout_s
                return  # its ranks may train, and it may come back
        else:
            cause = Cause(CauseKind.LOSS, None, "node", "was lost", making, reason, who=f"node {node.index}")
            self._regrouping.fault(cause, since_s)
            job.incidents.step_up(Rung.NODE, str(cause))
            job.gather_by_s = job.clock() + job.config.regroup_timeout_s
            if job.rendezvous.host == node.index:
                self._processes.ask_for_store()
        if job.outcome is None:
            self._replace(node)

    def _replace(self, lost: Node) -> None:
        job = self._job
        spare = job.free_spare()
        if spare is None:
            left_s = (job.gather_by_s or 0.0) - job.clock()
            job.say(f"no spare is ready: waiting up to {max(left_s, 0):.0f} s for another node {lost.index}")
            return
        job.spares.remove(spare)
        job.say(f"a spare takes the place of node {lost.index}")
        job.put_in_place(spare, lost.index)
        self.joined(spare)


def _drop(command: Command) -> None:
    logger.info("%r is for a node that is lost", command.type)


def _is_last_holder(node: Node, ranks: Sequence[Rank], fresh: Collection[int]) -> bool:
    """Return whether a living rank of ``node`` holds a shard that no living rank elsewhere is known to hold.

    Ranks that have not said which shard they hold share the state with all others or have none, so they do not
    count; nor do ``fresh`` ones, whose processes may not have received any state yet.
    """
    living = [rank for rank in ranks if rank.state is not RankState.GONE and rank.number not in fresh]
    elsewhere = {rank.shard for rank in living if rank.node is not node}
    return any(rank.shard is not None and rank.shard not in elsewhere for rank in living if rank.node is node)
