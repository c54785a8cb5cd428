"""A rank's client under the vendor's agent: from one generation into the next, and to the end."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

from torch.distributed import PrefixStore, Store, TCPStore

from checkpointless.launcher.client.agent_client import (
    AgentLostError,
    FaultLimits,
    RankClient,
    RankUnknownError,
    tell,
)
from checkpointless.launcher.protocol.messages import (
    Barrier,
    Done,
    FaultNotice,
    FaultReport,
    Finish,
    GiveUp,
    Go,
    Hello,
    RankMessage,
    Replace,
)
from checkpointless.system.environment import RANK_ENV

# --- The vendor's package ``hyperpod-elastic-agent``: what is used of it, and where that is known from ------------
#
# Only these public names are used:
# * ``hyperpod_elastic_agent.ipc``: ``InProcessRestartSocketClient()``, ``HyperPodIPCException``, ``RestartMode``
#   with ``IN_PROCESS_RESTART`` and ``PROCESS_LEVEL_RESTART``; the client's methods ``hyperpod_wait_rank_info``,
#   ``hyperpod_barrier``, ``hyperpod_past_rcb_barrier``, ``hyperpod_wait_fault`` and ``hyperpod_send_fault``.
#   AWS's published training library (aws/sagemaker-hyperpod-checkpointless-training,
#   ``inprocess/train_utils.py`` and ``inprocess/elastic/hp_agent_api.py``) calls all of them. The developer
#   guide's API reference names ``hyperpod_wait_rank_info`` and says what ``HPAgentK8sAPIFactory`` and
#   ``wait_rank`` are for.
# * The replies ``("job_rank_info" | "job_start", {"worker_envs": {...}})`` and ``("job_fault", {...})``, and
#   ``JOB_RESTART_COUNT`` in ``_worker_envs``. They are known from the same library.
# * ``restart_count`` in a ``job_fault``, the variable ``SPARE``, the argument ``timeout``, the arguments
#   ``reason`` and ``message`` of ``hyperpod_send_fault`` and the variable
#   ``HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH``. They are known from signatures and docstrings of the package
#   itself (1.1.0 to 1.1.3).

_MODULE = "hyperpod_elastic_agent.ipc"
_METHODS = (
    "hyperpod_wait_rank_info",
    "hyperpod_barrier",
    "hyperpod_past_rcb_barrier",
    "hyperpod_wait_fault",
    "hyperpod_send_fault",
)
_RESTART_MODES = ("IN_PROCESS_RESTART", "PROCESS_LEVEL_RESTART")
_INSTALL = "pip install -e '.[hyperpod]' in a clone"


@dataclass(frozen=True)
class _VendorPackage:
    """The parts of ``hyperpod_elastic_agent.ipc`` that are used.

    Attributes:
        error: the exception that the client's methods raise, also when a time limit has passed.
    """

    client: Callable[[], Any]
    error: type[Exception]
    in_place: object
    new_processes: object

    @classmethod
    def load(cls) -> _VendorPackage:
        """Import the package and check that it has every name that is used.

        Raises:
            RuntimeError: the package is not installed, cannot be imported, or lacks a name; its one line says what
                to do.
        """
        try:
            module = importlib.import_module(_MODULE)
        except ModuleNotFoundError as error:
            if error.name not in (_MODULE, _MODULE.partition(".")[0]):
                raise RuntimeError(f"{_MODULE} cannot be imported ({error}): {_INSTALL}") from error
            raise RuntimeError(
                "SageMaker HyperPod's agent started this process, but hyperpod_elastic_agent.ipc is not installed "
                f"for this Python: {_INSTALL}"
            ) from error
        except ImportError as error:
            raise RuntimeError(f"{_MODULE} cannot be imported ({error}): {_INSTALL}") from error
        client = getattr(module, "InProcessRestartSocketClient", None)
        modes = getattr(module, "RestartMode", None)
        missing = [f"RestartMode.{name}" for name in _RESTART_MODES if not hasattr(modes, name)]
        missing += [
            f"InProcessRestartSocketClient.{name}" for name in _METHODS if not callable(getattr(client, name, None))
        ]
        error_type = getattr(module, "HyperPodIPCException", None)
        if error_type is None:
            missing.append("HyperPodIPCException")
        if client is None or modes is None or error_type is None or missing:
            raise RuntimeError(
                f"{_MODULE} has no {', '.join(missing)}: install a version that has (1.1.0 to 1.1.3 do): {_INSTALL}"
            )
        return cls(client, error_type, modes.IN_PROCESS_RESTART, modes.PROCESS_LEVEL_RESTART)


# --- What the vendor's client replies, checked before anything is done with it ------------------------------------


@dataclass(frozen=True)
class Start:
    """The vendor's agent has started the job, or started it again.

    Attributes:
        generation: the ``JOB_RESTART_COUNT``.
    """

    generation: int
    rank: int
    world_size: int
    env: dict[str, str]

    @classmethod
    def of(cls, reply: object) -> Start:
        """Return the start that ``hyperpod_barrier`` returned.

        Raises:
            ValueError: the reply is something else, or says too little.
        """
        env = _worker_envs(reply, "job_start")
        return cls(int(env["JOB_RESTART_COUNT"]), int(env["RANK"]), int(env["WORLD_SIZE"]), env)

    @property
    def layout(self) -> tuple[int, int]:
        """The rank and the world size."""
        return self.rank, self.world_size


def _worker_envs(reply: object, expected: str) -> dict[str, str]:
    """Return this rank's environment from a reply of the vendor's client.

    Args:
        reply: what ``hyperpod_barrier`` or ``hyperpod_wait_rank_info`` returned.

    Raises:
        ValueError: the reply is something else, or says too little.
    """
    if not isinstance(reply, tuple) or len(reply) != 2 or reply[0] != expected:
        raise ValueError(f"expected a {expected!r} message and got {str(reply)[:200]}")
    env = reply[1].get("worker_envs") if isinstance(reply[1], dict) else None
    if not isinstance(env, dict) or not all(isinstance(item, str) for pair in env.items() for item in pair):
        raise ValueError(f"{expected!r} has no worker_envs of texts")
    start = ("MASTER_PORT", "JOB_RESTART_COUNT") if expected == "job_start" else ()
    for name in ("RANK", "WORLD_SIZE", *start):
        if not env.get(name, "").lstrip("-").isdecimal():
            raise ValueError(f"{expected!r}: {name}={env.get(name)!r} is not a whole number")
    if expected == "job_start" and not 0 <= int(env["RANK"]) < int(env["WORLD_SIZE"]):
        raise ValueError(f"{expected!r}: RANK={env['RANK']} is not below WORLD_SIZE={env['WORLD_SIZE']}")
    return env


# --- The vendor's agent: every call to it, each with its limit ----------------------------------------------------


LISTEN_S = 60.0  # long, because the vendor's client drops what arrives between two calls
MAX_MESSAGE_CHARS = 1000  # shown in the job's status; also, several threads may send, so it must fit into one write


class _ReportError(ConnectionError):
    """The agent did not take a report."""


class _VendorAgent:
    """A connection to the vendor's agent.

    Args:
        start_timeout_s: how many seconds the agent may take to start the job, or to start it again.

    Raises:
        RuntimeError: the agent cannot be reached.
    """

    def __init__(self, package: _VendorPackage, start_timeout_s: float) -> None:
        self._package = package
        self._start_timeout_s = start_timeout_s
        try:
            self._vendor = package.client()
        except (OSError, ValueError, package.error) as error:
            raise RuntimeError(
                f"SageMaker HyperPod's agent cannot be reached ({error}): start the job with "
                "`hyperpodrun --inprocess-restart`"
            ) from error

    def wait_rank_info(self) -> dict[str, str]:
        """Wait until the agent says which rank this process is, without a limit, and return the environment for it.

        Raises:
            RankUnknownError: the agent is gone, or said something else.
        """
        while True:
            began_s = time.monotonic()
            try:
                return _worker_envs(
                    self._vendor.hyperpod_wait_rank_info(timeout=self._start_timeout_s), "job_rank_info"
                )
            except (self._package.error, ValueError) as error:
                timed_out = time.monotonic() - began_s > self._start_timeout_s / 2
                if not timed_out or isinstance(error, ValueError):
                    raise RankUnknownError(
                        f"SageMaker HyperPod's agent did not say which rank this is ({error}): was the job started "
                        "with `hyperpodrun --inprocess-restart`?"
                    ) from error
                logger.warning("still waiting to be told which rank this is: %s", error)

    def wait_start(self, stopped: threading.Event) -> Start:
        """Report at the barrier, and wait until the agent starts the job; a spare then waits again.

        Raises:
            RuntimeError: no start came in time.
            ValueError: the agent said something else.
        """
        while True:
            began_s = time.monotonic()
            try:
                return Start.of(self._vendor.hyperpod_barrier(timeout=self._start_timeout_s))
            except self._package.error as error:
                timed_out = time.monotonic() - began_s > self._start_timeout_s / 2
                if os.environ.get("SPARE") == "True" and timed_out and not stopped.is_set():
                    continue
                raise RuntimeError(
                    f"no start message arrived ({error}): "
                    "was the job started with `hyperpodrun --inprocess-restart`?"
                ) from error

    def pass_barrier(self) -> None:
        """Tell the agent that this rank has heard of the start."""
        self._vendor.hyperpod_past_rcb_barrier()

    def report_fault(self, rank: int, reason: str, message: str, *, in_place: bool = True) -> None:
        """Report a fault of this rank.

        Args:
            message: one line, of which the first :data:`MAX_MESSAGE_CHARS` characters are sent.
            in_place: whether processes may stay alive; otherwise every process of the job is replaced.

        Raises:
            ReportError: the agent did not take the report.
        """
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS - 4]} ..."
        mode = self._package.in_place if in_place else self._package.new_processes
        try:
            self._vendor.hyperpod_send_fault(rank, mode, reason=reason, message=message)
        except self._package.error as error:
            raise _ReportError(f"could not report a fault: {error}") from error

    def notices(self, stopped: threading.Event) -> Iterator[tuple[object, Any]]:
        """Yield the kind and the body of everything that the agent says to a rank that waits for a fault."""
        while not stopped.is_set():
            began_s = time.monotonic()
            try:
                kind, body = self._vendor.hyperpod_wait_fault(timeout=LISTEN_S)
            except self._package.error:
                if time.monotonic() - began_s < LISTEN_S / 2:  # not a timeout: something is wrong; do not spin
                    stopped.wait(1.0)
                continue
            yield kind, body


# --- Where ranks meet once the vendor's agent has started them, and again when they are done: a store of rank 0 ---


FINISH_TIMEOUT_S = 3600.0  # one rank may be writing a last checkpoint
STORE_LOST_TIMEOUT_S = 60.0  # for the agent to say that rank 0 is gone
POLL_S = 0.05
CONNECT_TIMEOUT_S = 60.0
CONNECT_ATTEMPT_S = 2.0
LEAVE_TIMEOUT_S = 10.0  # for the others to hear of the end before the rank that hosts the store exits
_PREFIX = "checkpointless"


class _MeetingPlace:
    """Rank 0's store, which every rank looks for at the address and port that a start names.

    Args:
        timeout_s: how many seconds the other ranks may take to come once the agent has started the job.
        stopped: set once no rank will be met any more; it ends every wait.
    """

    def __init__(self, timeout_s: float, stopped: threading.Event) -> None:
        self._timeout_s = timeout_s
        self._stopped = stopped
        self._called_off = threading.Event()
        self._leaving = threading.Condition()
        self._in_c10d = 0  # threads that are inside c10d
        self._host: TCPStore | None = None  # rank 0's store, which outlives the generations
        self._host_port = -1
        self._groups: TCPStore | None = None  # rank 0's store for the process groups of one generation
        self._store: Store | None = None

    @property
    def is_called_off(self) -> bool:
        """Whether :meth:`call_off` was called since :meth:`prepare`."""
        return self._called_off.is_set()

    def prepare(self) -> None:
        """Forget what called off the meeting before."""
        self._called_off.clear()

    def call_off(self) -> None:
        """End the meeting in progress, because a fault came first."""
        self._called_off.set()

    def meet(self, start: Start, high_water: int) -> Go | None:
        """Meet the other ranks.

        Args:
            high_water: the highest optimizer step that must have been committed, as far as this rank knows.

        Returns:
            What the rank enters its block with; None if :meth:`call_off` or the end of all waits came first.

        Raises:
            RuntimeError: the store cannot be reached, or not all ranks came in time.
        """
        by_s = time.monotonic() + self._timeout_s
        try:
            with self._inside_c10d():
                return self._meet(start, high_water)
        except RuntimeError:
            # Rank 0 may have died, and the store with it; then the agent says so.
            if self._called_off.wait(max(0.0, by_s - time.monotonic())):
                return None
            raise

    def wait_until_all_are_done(self, rank: int, world_size: int, is_over: Callable[[], bool]) -> None:
        """Wait until every rank that was met calls this, for :data:`FINISH_TIMEOUT_S` at most.

        Args:
            is_over: whether there is nothing to wait for any more, because the generation has failed.

        Raises:
            RuntimeError: nobody was met.
        """
        by_s = time.monotonic() + FINISH_TIMEOUT_S
        store = self._store
        if store is None:
            raise RuntimeError(f"rank {rank} is done but has met no other rank")
        try:
            with self._inside_c10d():
                met = self._all_left(store, rank, world_size, is_over, by_s)
        except RuntimeError as error:
            # Rank 0 is gone. Either this is the regular end, or the agent will report it.
            logger.warning("rank %d is done and cannot ask about the others: %s", rank, error)
            by_s, met = time.monotonic() + STORE_LOST_TIMEOUT_S, False
        while not met and not is_over() and time.monotonic() < by_s:
            self._stopped.wait(POLL_S)

    def wait_until_free(self) -> None:
        """Wait until no thread is inside c10d, :data:`CONNECT_TIMEOUT_S` at most."""
        with self._leaving:
            self._leaving.wait_for(lambda: not self._in_c10d, timeout=CONNECT_TIMEOUT_S)

    def _meet(self, start: Start, high_water: int) -> Go | None:
        store = self._connect(start)
        if store is None:
            return None
        if high_water >= 0:
            store.append("committed", f"{high_water} ")  # type: ignore[attr-defined]
        present = store.add("arrived", 1)
        by_s = time.monotonic() + self._timeout_s
        while not store.check(["go"]):
            if start.rank == 0 and present == start.world_size:
                self._groups = TCPStore(start.env["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
                known = store.get("committed").decode().split() if store.check(["committed"]) else []
                highest = max((int(each) for each in known), default=-1)
                store.set("go", f"{self._groups.port} {highest}")
            elif self._called_off.is_set() or self._stopped.wait(POLL_S):
                return None
            elif time.monotonic() > by_s:
                raise RuntimeError(
                    f"{present} of {start.world_size} ranks reached the start of generation {start.generation} "
                    f"within {self._timeout_s:.0f} s"
                )
            else:
                present = store.add("arrived", 0)
        port, highest_text = store.get("go").decode().split()
        self._store = store
        env = {**start.env, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        incident = str(start.generation) if start.generation > 0 else None
        return Go(start.generation, incident, env, int(highest_text))

    def _connect(self, start: Start) -> Store | None:
        """Return rank 0's store, or None if :meth:`call_off` or the end of all waits comes first."""
        address, port = start.env["MASTER_ADDR"], int(start.env["MASTER_PORT"])
        if start.rank == 0 and (self._host is None or self._host_port != port):
            timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
            self._host = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)
            self._host_port = port
        store = self._host if start.rank == 0 else self._join(address, port)
        return None if store is None else PrefixStore(f"{_PREFIX}/{start.generation}", store)

    def _join(self, address: str, port: int) -> TCPStore | None:
        by_s = time.monotonic() + CONNECT_TIMEOUT_S
        timeout = timedelta(seconds=CONNECT_ATTEMPT_S)  # short, because nothing can stop an attempt
        while not (self._called_off.is_set() or self._stopped.is_set()):
            try:
                store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
            except RuntimeError:
                if time.monotonic() > by_s:
                    raise
            else:
                store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
                return store
        return None

    def _all_left(self, store: Store, rank: int, world_size: int, is_over: Callable[[], bool], by_s: float) -> bool:
        store.add("done", 1)
        while store.add("done", 0) < world_size:
            if is_over():
                return False
            if time.monotonic() > by_s:
                logger.warning("rank %d was done %.0f s ago and waits no longer", rank, FINISH_TIMEOUT_S)
                return True
            self._stopped.wait(POLL_S)
        left = store.add("left", 1)
        by_s = time.monotonic() + LEAVE_TIMEOUT_S
        while rank == 0 and left < world_size and time.monotonic() < by_s and not self._stopped.is_set():
            time.sleep(POLL_S)
            left = store.add("left", 0)
        return True

    @contextmanager
    def _inside_c10d(self) -> Iterator[None]:
        with self._leaving:
            self._in_c10d += 1
        try:
            yield
        finally:
            with self._leaving:
                self._in_c10d -= 1
                self._leaving.notify_all()


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
        package: _VendorPackage,
        start_timeout_s: float = START_TIMEOUT_S,
        meeting_timeout_s: float = MEETING_TIMEOUT_S,
    ) -> None:
        super().__init__(rank=int(os.environ.get(RANK_ENV) or "-1"))
        self._agent = _VendorAgent(package, start_timeout_s)
        self._stopped = threading.Event()
        self._meeting = _MeetingPlace(meeting_timeout_s, self._stopped)
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
        return cls(_VendorPackage.load())

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
        except _ReportError as error:
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
