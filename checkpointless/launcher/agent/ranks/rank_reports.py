"""Takes what the ranks of a node say, and reports it to the coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from checkpointless.launcher.agent.ranks.known_job import KnownJob
from checkpointless.launcher.agent.ranks.local_rank import EXIT_GRACE_S, LocalRank
from checkpointless.launcher.protocol.causes import Cause, CauseKind
from checkpointless.launcher.protocol.messages import (
    Answer,
    Barrier,
    Done,
    FaultReport,
    GiveUp,
    Hello,
    Inexact,
    RankMessage,
    Replace,
)
from checkpointless.launcher.protocol.node_messages import (
    COUNTED,
    IN_BLOCK,
    Answered,
    JobOver,
    NodeMessage,
    RankDone,
    RankInexact,
    RankReady,
    RankState,
    Trouble,
)
from checkpointless.observability.telemetry.event_names import EventName

logger = logging.getLogger(__name__)


class RankReports:
    """Reports what ranks say, as far as it is about the generation that this node knows of.

    Args:
        job: what this node knows of the job.
        report: sends a message to the coordinator.
        clock: clock of the times after which a process is killed.
    """

    def __init__(self, job: KnownJob, report: Callable[[NodeMessage], None], clock: Callable[[], float]) -> None:
        self._job = job
        self._report = report
        self._clock = clock

    def hear(self, rank: LocalRank) -> None:
        """Take what the rank has said since the last call.

        Raises:
            ProtocolError: the rank does not keep to the protocol.
        """
        while rank.link is not None:
            try:
                messages = rank.link.receive()
            except EOFError:
                rank.disconnect()
                if rank.state in COUNTED and self._job.outcome is None:
                    rank.kill_at_s = self._clock() + EXIT_GRACE_S
                return
            if messages is None:
                return
            for message in messages:
                if self._job.outcome is None:
                    self._on_message(rank, message)

    def _on_message(self, rank: LocalRank, message: RankMessage) -> None:
        if isinstance(message, Hello):
            self._on_hello(rank)
        elif isinstance(message, Answer):
            self._report(
                Answered(
                    message.id,
                    rank.number,
                    message.in_collective,
                    message.stack,
                    message.is_async,
                    message.launched,
                )
            )
        elif isinstance(message, GiveUp):
            self._report(JobOver(message.reason, message.code, message.generation, message.is_lost))
        elif isinstance(message, Replace):
            self._on_replace(rank, message)
        elif message.generation != self._job.generation or rank.state not in (*IN_BLOCK, RankState.LEAVING):
            logger.info("rank %d: %s of generation %d is stale", rank.number, message.type, message.generation)
        elif isinstance(message, FaultReport):
            self._trouble(rank, msgspec.structs.replace(message.cause, rank=rank.number))
        elif isinstance(message, Inexact):
            self._report(RankInexact(rank.number, message.generation, message.reason))
        elif isinstance(message, Barrier):
            self._is_ready(rank, entered=True, unfit=message.unfit)
        elif isinstance(message, Done) and rank.state is RankState.RUNNING:
            rank.state = RankState.DONE
            reading = rank.board.read()
            self._report(RankDone(rank.number, message.generation, reading.committed, reading.making))

    def _on_hello(self, rank: LocalRank) -> None:
        if rank.state not in (RankState.STARTING, RankState.FINISHED):
            logger.warning("rank %d said hello in the state %s", rank.number, rank.state.value)
            return
        if rank.incarnation > 0 and not rank.said_hello:
            seconds = time.monotonic() - rank.started_at_s
            incarnation = rank.incarnation
            self._job.emit(EventName.RESPAWN, "end", rank=rank.number, seconds=seconds, incarnation=incarnation)
        rank.said_hello = True
        self._is_ready(rank)

    def _on_replace(self, rank: LocalRank, message: Replace) -> None:
        rank.forgiven, rank.handed_over = True, message.handed_over
        rank.kill_at_s = self._clock() + EXIT_GRACE_S
        if rank.state in IN_BLOCK:
            step = rank.board.read().making
            what = "asked to be replaced"
            self._trouble(rank, Cause(CauseKind.LOSS, rank.number, "replace", what, step, message.reason))

    def _is_ready(self, rank: LocalRank, *, entered: bool = False, unfit: str = "") -> None:
        rank.state = RankState.READY
        reading, pid = rank.board.read(), rank.pid or -1
        self._report(
            RankReady(rank.number, rank.incarnation, pid, reading.committed, reading.making, entered, unfit)
        )

    def _trouble(self, rank: LocalRank, cause: Cause) -> None:
        reading = rank.board.read()
        self._report(Trouble(self._job.generation, cause, reading.committed, reading.making))
