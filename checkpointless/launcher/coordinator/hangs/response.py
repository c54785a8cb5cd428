"""What follows from a rank without progress: inquiries, reports of stalls, and ranks that are made to leave."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from checkpointless.launcher.coordinator.hangs.policy import Whereabouts
from checkpointless.launcher.coordinator.hangs.watch import HangWatch, Stall
from checkpointless.launcher.coordinator.job import Job
from checkpointless.launcher.coordinator.processes import Processes
from checkpointless.launcher.coordinator.regrouping import Regrouping
from checkpointless.launcher.coordinator.roster import Node
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.node_messages import Answered, Ask, Progress, RankState, Silent
from checkpointless.observability.telemetry.event_names import EventName


class HangReports:
    """Carries the questions of the hang watch to the nodes, and its stalls to the event log and the terminal.

    Args:
        job: the job.
    """

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
        beat: the beat at which it hung.
        generation: the generation that it has to leave.
    """

    until_s: float
    beat: int
    generation: int


class HangResponse:
    """Opens an incident for each hang that the watch finds, and has ranks killed that do not leave their block.

    Args:
        job: the job.
        hangs: the watch over ranks without progress.
        regrouping: opens incidents.
        processes: kills ranks.
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
