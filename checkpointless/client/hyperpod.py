"""The client of a rank that Amazon SageMaker HyperPod's own agent (``hyperpodrun``) started.

It talks to that agent through the vendor's package ``hyperpod-elastic-agent`` and uses only these public names:

* ``hyperpod_elastic_agent.ipc``: ``InProcessRestartSocketClient()``, ``HyperPodIPCException``, ``RestartMode`` with
  ``IN_PROCESS_RESTART`` and ``PROCESS_LEVEL_RESTART``; the client's methods ``hyperpod_wait_rank_info``,
  ``hyperpod_barrier``, ``hyperpod_past_rcb_barrier``, ``hyperpod_wait_fault`` and ``hyperpod_send_fault``. AWS's
  published training library (aws/sagemaker-hyperpod-checkpointless-training, ``inprocess/train_utils.py`` and
  ``inprocess/elastic/hp_agent_api.py``) calls all of them. The developer guide's API reference names
  ``hyperpod_wait_rank_info`` and says what ``HPAgentK8sAPIFactory`` and ``wait_rank`` are for.
* The replies ``("job_rank_info" | "job_start", {"worker_envs": {...}})`` and ``("job_fault", {...})``, and
  ``JOB_RESTART_COUNT`` in ``worker_envs``. They are known from the same library.
* ``restart_count`` in a ``job_fault``, the variable ``SPARE``, the argument ``timeout``, the arguments ``reason``
  and ``message`` of ``hyperpod_send_fault`` and the variable ``HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH``. They are
  known from signatures and docstrings of the package itself (1.1.0 to 1.1.3).

Where these sources say nothing, this client is written so that a wrong guess ends the process, which the vendor's
agent looks after, and never lets a rank go on training with a state that is not its own:

* Every wait for the agent has a limit; only a spare (``SPARE=True``) at the barrier, and a process that asks for
  its rank, start the wait again.
* A start ends the process if its ``JOB_RESTART_COUNT`` is not above the last one, or if it gives another rank or
  world size to a process that holds state.
* It is not documented whether ``MASTER_PORT`` is fresh at each start. Rank 0 hosts a store there, in which all
  ranks meet once more; process groups get a store on a separate port.
* A notice that comes between ``job_start`` and that meeting sends the rank back to the vendor's barrier.
* No message says that a rank is done, so the ranks wait for each other in that store, with a limit.
* A rank cannot end the job. It asks for ``PROCESS_LEVEL_RESTART`` if it cannot be recovered in place; the operator
  has to limit how often that may happen.
* A process that must be replaced reports its fault and exits, as a process that crashed would.

No message from the network is unpickled or evaluated here; the vendor's package reads JSON.
"""

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

from checkpointless.client.agent_client import AgentLostError, RankClient, RankUnknownError
from checkpointless.client.standalone import FaultLimits, tell
from checkpointless.wire.messages import (
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

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0  # a node may have to be replaced first
MEETING_TIMEOUT_S = 120.0
FINISH_TIMEOUT_S = 3600.0  # one rank may be writing a last checkpoint
STORE_LOST_TIMEOUT_S = 60.0  # for the agent to say that rank 0 is gone
LISTEN_S = 60.0  # long, because the vendor's client drops what arrives between two calls
POLL_S = 0.05
CONNECT_TIMEOUT_S = 60.0
CONNECT_ATTEMPT_S = 2.0
LEAVE_TIMEOUT_S = 10.0  # for the others to hear of the end before the rank that hosts the store exits
MAX_MESSAGE_CHARS = 1000  # shown in the job's status; also, several threads may send, so it must fit into one write

_MODULE = "hyperpod_elastic_agent.ipc"
_METHODS = (
    "hyperpod_wait_rank_info",
    "hyperpod_barrier",
    "hyperpod_past_rcb_barrier",
    "hyperpod_wait_fault",
    "hyperpod_send_fault",
)
_RESTART_MODES = ("IN_PROCESS_RESTART", "PROCESS_LEVEL_RESTART")
_INSTALL = "pip install 'checkpointless[hyperpod]'"
_PREFIX = "checkpointless"


@dataclass(frozen=True)
class VendorPackage:
    """The parts of ``hyperpod_elastic_agent.ipc`` that are used.

    Attributes:
        client: the client's class, which makes a connected client.
        error: the exception that the client's methods raise, also when a time limit has passed.
        in_place: the restart mode in which processes stay alive.
        new_processes: the restart mode in which every process of the job is replaced.
    """

    client: Callable[[], Any]
    error: type[Exception]
    in_place: Any
    new_processes: Any

    @classmethod
    def load(cls) -> VendorPackage:
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
        super().__init__(rank=int(os.environ.get("RANK") or "-1"))
        self._package = package
        self._start_timeout_s = start_timeout_s
        self._meeting_timeout_s = meeting_timeout_s
        try:
            self._vendor = package.client()
        except (OSError, ValueError, package.error) as error:
            raise RuntimeError(
                f"SageMaker HyperPod's agent cannot be reached ({error}): start the job with "
                "`hyperpodrun --inprocess-restart`"
            ) from error
        self._informed = False
        self._place = _Place.OUTSIDE
        self._starting = -1  # the generation that the agent started last
        self._back = threading.Event()  # go back to the vendor's barrier: a fault came during the meeting
        self._layout: tuple[int, int] | None = None  # rank and world size, once a generation has been entered
        self._limits = FaultLimits()
        self._in_c10d = 0  # threads that are inside c10d
        self._host: TCPStore | None = None  # rank 0's store, which outlives the generations
        self._host_port = -1
        self._groups: TCPStore | None = None  # rank 0's store for the process groups of one generation
        self._store: Store | None = None
        self._stopped = threading.Event()
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
        env = None
        while env is None:
            began_s = time.monotonic()
            try:
                env = worker_envs(
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
        self._informed = True
        os.environ.update(env)
        self.rank = int(env["RANK"])

    def close(self) -> None:
        """Stop the client, and wait until none of its threads is inside c10d, :data:`CONNECT_TIMEOUT_S` at most.

        The vendor's package has no public way to close its connection, which ends with the process.
        """
        self._stopped.set()
        with self._news:
            self._news.wait_for(lambda: not self._in_c10d, timeout=CONNECT_TIMEOUT_S)
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
            self._send_fault(self._package.in_place, "ProcessMustBeReplaced", message.reason)
        elif isinstance(message, GiveUp):
            self._send_fault(self._package.new_processes, "RecoveryImpossible", message.reason)

    def _report(self, report: FaultReport) -> None:
        cause, last_word = self._limits.after(self.rank, report)
        mode = self._package.in_place if last_word is None else self._package.new_processes
        self._send_fault(mode, report.error, str(cause))
        if self.pending_fault(report.generation) is None:
            incident = str(report.generation + 1)
            tell(report.generation, incident, cause)
            self._hear(FaultNotice(report.generation, incident, str(cause), self.rank))
        if last_word is not None:
            self._lose(last_word)

    def _send_fault(self, mode: Any, reason: str, message: str) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS - 4]} ..."
        try:
            self._vendor.hyperpod_send_fault(self.rank, mode, reason=reason, message=message)
        except self._package.error as error:
            self._fail(f"could not report a fault: {error}")

    def _fail(self, reason: str) -> NoReturn:
        self._lose(reason)
        raise AgentLostError(f"SageMaker HyperPod's agent: {reason}")

    # --- what the agent says ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._stopped.is_set():
                began_s = time.monotonic()
                try:
                    kind, body = self._vendor.hyperpod_wait_fault(timeout=LISTEN_S)
                except self._package.error:
                    if time.monotonic() - began_s < LISTEN_S / 2:  # not a timeout: something is wrong; do not spin
                        self._stopped.wait(1.0)
                    continue
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
                self._back.set()
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
            env = self._await_start()
            generation = int(env["JOB_RESTART_COUNT"])
            layout = (int(env["RANK"]), int(env["WORLD_SIZE"]))
            if generation <= left:
                raise RuntimeError(f"a start with JOB_RESTART_COUNT={generation} came after generation {left}")
            if self._layout is not None and layout != self._layout:
                raise RuntimeError(
                    f"rank {self._layout[0]} of {self._layout[1]} would become rank {layout[0]} of {layout[1]}, "
                    "whose state it does not hold"
                )
            with self._news:
                self._back.clear()
                self._starting, self._place = generation, _Place.MEETING
            self._vendor.hyperpod_past_rcb_barrier()
            self.rank = layout[0]
            met = self._try_to_meet(generation, env, *layout)
            with self._news:
                if met is not None and not self._back.is_set():
                    self._layout, self._place = layout, _Place.INSIDE
                    self._hear(met)
                    return
                self._place = _Place.BARRIER
            if self._stopped.is_set():
                return
            logger.warning(
                "rank %d goes back to the barrier: a fault came before generation %d", self.rank, generation
            )

    def _await_start(self) -> dict[str, str]:
        while True:
            began_s = time.monotonic()
            try:
                return worker_envs(self._vendor.hyperpod_barrier(timeout=self._start_timeout_s), "job_start")
            except self._package.error as error:
                timed_out = time.monotonic() - began_s > self._start_timeout_s / 2
                if os.environ.get("SPARE") == "True" and timed_out and not self._stopped.is_set():
                    continue
                raise RuntimeError(
                    f"no start came ({error}): was the job started with `hyperpodrun --inprocess-restart`?"
                ) from error

    def _try_to_meet(self, generation: int, env: dict[str, str], rank: int, world_size: int) -> Go | None:
        by_s = time.monotonic() + self._meeting_timeout_s
        try:
            with self._inside_c10d():
                return self._meet(generation, env, rank, world_size)
        except RuntimeError:
            # Rank 0 may have died, and the store with it; then the agent says so.
            if self._back.wait(max(0.0, by_s - time.monotonic())):
                return None
            raise

    def _meet(self, generation: int, env: dict[str, str], rank: int, world_size: int) -> Go | None:
        """Meet the other ranks in rank 0's store; return None if a fault notice or :meth:`close` comes first."""
        store = self._connect(generation, env, rank)
        if store is None:
            return None
        if self._limits.high_water >= 0:
            store.append("committed", f"{self._limits.high_water} ")  # type: ignore[attr-defined]
        present = store.add("arrived", 1)
        by_s = time.monotonic() + self._meeting_timeout_s
        while not store.check(["go"]):
            if rank == 0 and present == world_size:
                self._groups = TCPStore(env["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
                known = store.get("committed").decode().split() if store.check(["committed"]) else []
                high_water = max((int(each) for each in known), default=-1)
                store.set("go", f"{self._groups.port} {high_water}")
            elif self._back.is_set() or self._stopped.wait(POLL_S):
                return None
            elif time.monotonic() > by_s:
                raise RuntimeError(
                    f"{present} of {world_size} ranks came to the start of generation {generation} within "
                    f"{self._meeting_timeout_s:.0f} s"
                )
            else:
                present = store.add("arrived", 0)
        port, high_water_text = store.get("go").decode().split()
        self._limits.high_water = int(high_water_text)
        self._store = store
        env = {**env, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return Go(generation, str(generation) if generation > 0 else None, env, self._limits.high_water)

    def _connect(self, generation: int, env: dict[str, str], rank: int) -> Store | None:
        """Return rank 0's store, or None if a fault notice or :meth:`close` comes first."""
        address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        if rank == 0 and (self._host is None or self._host_port != port):
            timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
            self._host = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)
            self._host_port = port
        store = self._host if rank == 0 else self._join(address, port)
        return None if store is None else PrefixStore(f"{_PREFIX}/{generation}", store)

    def _join(self, address: str, port: int) -> TCPStore | None:
        by_s = time.monotonic() + CONNECT_TIMEOUT_S
        timeout = timedelta(seconds=CONNECT_ATTEMPT_S)  # short, because nothing can stop an attempt
        while not (self._back.is_set() or self._stopped.is_set()):
            try:
                store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
            except RuntimeError:
                if time.monotonic() > by_s:
                    raise
            else:
                store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
                return store
        return None

    @contextmanager
    def _inside_c10d(self) -> Iterator[None]:
        with self._news:
            self._in_c10d += 1
        try:
            yield
        finally:
            with self._news:
                self._in_c10d -= 1
                self._news.notify_all()

    # --- the end ------------------------------------------------------------------------------------------------

    def _wait_for_all(self, generation: int) -> None:
        """Give this rank ``finish`` when all ranks are done, unless a fault notice comes first."""
        by_s = time.monotonic() + FINISH_TIMEOUT_S
        store, layout = self._store, self._layout
        if store is None or layout is None:
            raise RuntimeError(f"rank {self.rank} is done with generation {generation}, which it never entered")
        try:
            with self._inside_c10d():
                met = self._all_left(store, *layout, generation, by_s)
        except RuntimeError as error:
            # Rank 0 is gone. Either this is the regular end, or the agent will report it.
            logger.warning("rank %d is done and cannot ask about the others: %s", self.rank, error)
            by_s, met = time.monotonic() + STORE_LOST_TIMEOUT_S, False
        while not met and not self._is_over(generation) and time.monotonic() < by_s:
            self._stopped.wait(POLL_S)
        if not self._is_over(generation):
            self._hear(Finish())

    def _all_left(self, store: Store, rank: int, world_size: int, generation: int, by_s: float) -> bool:
        store.add("done", 1)
        while store.add("done", 0) < world_size:
            if self._is_over(generation):
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

    def _is_over(self, generation: int) -> bool:
        return self._stopped.is_set() or self.pending_fault(generation) is not None


def worker_envs(reply: object, expected: str) -> dict[str, str]:
    """Return this rank's environment from a reply of the vendor's client.

    Args:
        reply: what ``hyperpod_barrier`` or ``hyperpod_wait_rank_info`` returned.
        expected: the kind of message that the reply has to be.

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
            raise ValueError(f"{expected!r}: {name}={env.get(name)!r} is no whole number")
    if expected == "job_start" and not 0 <= int(env["RANK"]) < int(env["WORLD_SIZE"]):
        raise ValueError(f"{expected!r}: RANK={env['RANK']} is not below WORLD_SIZE={env['WORLD_SIZE']}")
    return env
