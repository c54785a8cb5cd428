"""A rank's client under the vendor's agent: from one generation into the next, and to the end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import NoReturn

from checkpointless.launcher.client.agent_client import AgentLostError, RankClient
from checkpointless.launcher.client.hyperpod.meeting import MeetingPlace
from checkpointless.launcher.client.hyperpod.package import VendorPackage
from checkpointless.launcher.client.hyperpod.vendor_agent import ReportError, VendorAgent
from checkpointless.launcher.client.standalone import FaultLimits, tell
from checkpointless.launcher.protocol.messages import (
    Barrier,
    Done,
    FaultNotice,
    FaultReport,
    Finish,
    GiveUp,
    Hello,
    RankMessage,
    Replace,
)
from checkpointless.system.environment import RANK_ENV

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0  # a node may have to be replaced first
MEETING_TIMEOUT_S = 120.0


class _Place(Enum):
    """Where this rank stands for the vendor's agent."""

    OUTSIDE = "not yet at a barrier"
    BARRIER = "at the vendor's barrier"
    MEETING = "started, and meeting the others"
    INSIDE = "in a generation, or leaving it"


class HyperPodClient(RankClient):
    """Regroups this rank through the vendor's agent, whose messages separate threads wait for.

    Args:
        package: the vendor's package.
        start_timeout_s: how many seconds the agent may take to start the job, or to start it again.
        meeting_timeout_s: how many seconds the other ranks may take to come once the agent has started the job.

    Raises:
        RuntimeError: the agent cannot be reached.
    """

    def __init__(
        self,
        package: VendorPackage,
        start_timeout_s: float = START_TIMEOUT_S,
        meeting_timeout_s: float = MEETING_TIMEOUT_S,
    ) -> None:
        super().__init__(rank=int(os.environ.get(RANK_ENV) or "-1"))
        self._agent = VendorAgent(package, start_timeout_s)
        self._stopped = threading.Event()
        self._meeting = MeetingPlace(meeting_timeout_s, self._stopped)
        self._informed = False
        self._place = _Place.OUTSIDE
        self._starting = -1  # the generation that the agent started last
        self._layout: tuple[int, int] | None = None  # rank and world size, once a generation has been entered
        self._limits = FaultLimits()
        self._listener = threading.Thread(target=self._listen, name="checkpointless-hyperpod-faults", daemon=True)

    @classmethod
    def from_environment(cls) -> HyperPodClient:
        """Connect to the agent that the environment names.

        Raises:
            RuntimeError: the vendor's package is missing or too old, or its agent cannot be reached.
        """
        return cls(VendorPackage.load())

    def wait_rank(self) -> None:
        """Wait until the agent says which rank this process is, and put that into ``os.environ``.

        Once the rank is known, later calls return at once. The wait has no time limit, because a spare waits for as
        long as it is a spare; a connection that closes ends it.

        Raises:
            RankUnknownError: the agent is gone, or said something else.
        """
        if self._informed:
            return
        env = self._agent.wait_rank_info()
        self._informed = True
        os.environ.update(env)
        self.rank = int(env["RANK"])

    def close(self) -> None:
        """Stop the client, and wait until none of its threads is inside c10d, a minute at most.

        The vendor's package has no public way to close its connection, which ends with the process.
        """
        self._stopped.set()
        self._meeting.wait_until_free()
        self._lose("closed")

    # --- what the rank says -------------------------------------------------------------------------------------

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, Hello):
            if self._place is not _Place.OUTSIDE:
                self._fail("it starts one block per process: wrap everything in one HPWrapper")
            self._listener.start()
            self._regroup_from(message.generation - 1)
        elif isinstance(message, Barrier) and self._lost is None:
            self._regroup_from(message.generation)
        elif isinstance(message, FaultReport):
            self._report(message)
        elif isinstance(message, Done):
            self._in_thread(lambda: self._wait_for_all(message.generation), "finish")
        elif isinstance(message, Replace):
            self._send_fault("ProcessMustBeReplaced", message.reason)
        elif isinstance(message, GiveUp):
            self._send_fault("RecoveryImpossible", message.reason, in_place=False)

    def _report(self, report: FaultReport) -> None:
        cause, last_word = report.cause, self._limits.after(report.cause)
        self._send_fault(cause.error, str(cause), in_place=last_word is None)
        if self.pending_fault(report.generation) is None:
            incident = str(report.generation + 1)
            tell(report.generation, incident, cause)
            self._hear(FaultNotice(report.generation, incident, str(cause), self.rank))
        if last_word is not None:
            self._lose(last_word)

    def _send_fault(self, reason: str, message: str, *, in_place: bool = True) -> None:
        try:
            self._agent.report_fault(self.rank, reason, message, in_place=in_place)
        except ReportError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> NoReturn:
        self._lose(reason)
        raise AgentLostError(f"SageMaker HyperPod's agent: {reason}")

    # --- what the agent says ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            for kind, body in self._agent.notices(self._stopped):
                if kind == "job_fault":
                    self._heard_fault(body.get("restart_count") if isinstance(body, dict) else None)
                else:
                    logger.warning("rank %d waited for a fault and heard %r", self.rank, kind)
        except Exception as error:
            logger.exception("rank %d can no longer listen to SageMaker HyperPod's agent", self.rank)
            self._lose(f"{type(error).__name__}: {error}")

    def _heard_fault(self, restart_count: object) -> None:
        """Handle a notice, which is about the generation started last unless ``restart_count`` names an older one.

        At the barrier there is nothing to leave, and the rank must not report there twice: the vendor's agent
        counts ranks by their reports, and what it says before the rank waits for it is lost.
        """
        with self._news:
            generation = self._starting
            stale = isinstance(restart_count, int) and restart_count < generation
            if stale or self._place in (_Place.OUTSIDE, _Place.BARRIER):
                logger.info("rank %d is %s: fault notice %s ignored", self.rank, self._place.value, restart_count)
                return
            if self._place is _Place.MEETING:
                self._meeting.call_off()
                return
            if self.pending_fault(generation) is not None:
                return
        self._hear(FaultNotice(generation, str(generation + 1), "SageMaker HyperPod reported a fault", None))

    # --- from one generation into the next ----------------------------------------------------------------------

    def _regroup_from(self, left: int) -> None:
        with self._news:
            self._place = _Place.BARRIER
            self._starting = left
        self._in_thread(self._regroup, "barrier")

    def _in_thread(self, work: Callable[[], None], what: str) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:
                logger.exception("rank %d cannot go on with SageMaker HyperPod's agent", self.rank)
                self._lose(str(error) or type(error).__name__)

        threading.Thread(target=run, name=f"checkpointless-hyperpod-{what}", daemon=True).start()

    def _regroup(self) -> None:
        while True:
            left = self._starting
            start = self._agent.wait_start(self._stopped)
            generation, layout = start.generation, start.layout
            if generation <= left:
                raise RuntimeError(f"a start with JOB_RESTART_COUNT={generation} came after generation {left}")
            if self._layout is not None and layout != self._layout:
                raise RuntimeError(
                    f"rank {self._layout[0]} of {self._layout[1]} would become rank {layout[0]} of {layout[1]}, "
                    "whose state it does not hold"
                )
            with self._news:
                self._meeting.prepare()
                self._starting, self._place = generation, _Place.MEETING
            self._agent.pass_barrier()
            self.rank = layout[0]
            met = self._meeting.meet(start, self._limits.high_water)
            if met is not None:
                self._limits.high_water = met.high_water
            with self._news:
                if met is not None and not self._meeting.is_called_off:
                    self._layout, self._place = layout, _Place.INSIDE
                    self._hear(met)
                    return
                self._place = _Place.BARRIER
            if self._stopped.is_set():
                return
            logger.warning(
                "rank %d goes back to the barrier: a fault came before generation %d", self.rank, generation
            )

    # --- the end ------------------------------------------------------------------------------------------------

    def _wait_for_all(self, generation: int) -> None:
        """Give this rank ``finish`` when all ranks are done, unless a fault notice comes first."""
        if self._layout is None:
            raise RuntimeError(f"rank {self.rank} is done with generation {generation}, which it never entered")
        self._meeting.wait_until_all_are_done(*self._layout, is_over=lambda: self._is_over(generation))
        if not self._is_over(generation):
            self._hear(Finish())

    def _is_over(self, generation: int) -> bool:
        return self._stopped.is_set() or self.pending_fault(generation) is not None
