"""The client of a rank that Amazon SageMaker HyperPod's own agent (``hyperpodrun``) started.

It talks to that agent through the vendor's package ``hyperpod-elastic-agent``. Once the agent has started a
generation, its ranks meet as under torchrun (:class:`~checkpointless.launcher.client.store_client.StoreClient`),
in a store that rank 0 hosts.

Of ``hyperpod_elastic_agent.ipc`` only these public names are used:

* ``InProcessRestartSocketClient()``, ``HyperPodIPCException``, ``RestartMode`` with ``IN_PROCESS_RESTART`` and
  ``PROCESS_LEVEL_RESTART``; the client's methods ``hyperpod_wait_rank_info``, ``hyperpod_barrier``,
  ``hyperpod_past_rcb_barrier``, ``hyperpod_wait_fault`` and ``hyperpod_send_fault``. AWS's published training
  library (aws/sagemaker-hyperpod-checkpointless-training, ``inprocess/train_utils.py`` and
  ``inprocess/elastic/hp_agent_api.py``) calls all of them.
* The replies ``("job_rank_info" | "job_start", {"worker_envs": {...}})`` and ``("job_fault", {...})``, and
  ``JOB_RESTART_COUNT`` among the ``worker_envs``: from the same library.
* ``restart_count`` in a ``job_fault``, the variable ``SPARE``, the arguments ``timeout``, ``reason`` and
  ``message``, and the variable ``HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH``: from the package itself (1.1.0 to
  1.1.3).

Where these sources say nothing, a wrong guess ends the process, which the vendor's agent replaces, and never lets a
rank go on training with a state that is not its own:

* A start ends the process if its ``JOB_RESTART_COUNT`` is not above the last one, or if it gives another rank or
  world size to a process that holds state.
* It is not documented whether ``MASTER_PORT`` is fresh at each start, so process groups get a store of their own.
* A notice that comes between ``job_start`` and the meeting sends the rank back to the vendor's barrier. At that
  barrier there is nothing to leave, and a rank must not report there twice: the agent counts the reports.
* A rank cannot end the job. It asks for ``PROCESS_LEVEL_RESTART`` if it cannot be recovered in place; the operator
  has to limit how often that may happen.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, HashStore, PrefixStore, TCPStore

from checkpointless.launcher.client.agent_client import AgentLostError, RankUnknownError
from checkpointless.launcher.client.store_client import CONNECT_TIMEOUT_S, StoreClient
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.messages import RankMessage
from checkpointless.system.environment import (
    JOB_RESTART_COUNT_ENV,
    MASTER_ADDR_ENV,
    MASTER_PORT_ENV,
    RANK_ENV,
    WORLD_SIZE_ENV,
)

logger = logging.getLogger(__name__)

_MODULE = "hyperpod_elastic_agent.ipc"
_INSTALL = "pip install -e '.[hyperpod]' in a clone (1.1.0 to 1.1.3 are known)"
_HOW = "was the job started with `hyperpodrun --inprocess-restart`?"
_LISTEN_S = 60.0  # long, because the vendor's client drops what arrives between two calls
_START_TIMEOUT_S = 3600.0  # a node may have to be replaced first
_MEETING_TIMEOUT_S = 120.0
_CONNECT_ATTEMPT_S = 2.0
_CONNECT_LIMIT = timedelta(seconds=CONNECT_TIMEOUT_S)
_FINISH_TIMEOUT_S = 3600.0  # for the others to be done: one may be writing a last checkpoint
_STORE_LOST_TIMEOUT_S = 60.0  # for the agent to say that rank 0 is gone
_MOST_CHARACTERS = 1000  # of a message: several threads may send, so it must fit into one write
_OF_A_START = (JOB_RESTART_COUNT_ENV, RANK_ENV, WORLD_SIZE_ENV)


def _worker_envs(reply: object, expected: str) -> dict[str, str]:
    """Return this rank's environment from a reply of the vendor's client; ``ValueError`` if it says too little."""
    if not isinstance(reply, tuple) or len(reply) != 2 or reply[0] != expected:
        raise ValueError(f"expected a {expected!r} message and got {str(reply)[:200]}")
    env = reply[1].get("worker_envs") if isinstance(reply[1], dict) else None
    if not isinstance(env, dict) or not all(isinstance(item, str) for pair in env.items() for item in pair):
        raise ValueError(f"{expected!r} has no worker_envs of texts")
    start = (MASTER_PORT_ENV, JOB_RESTART_COUNT_ENV) if expected == "job_start" else ()
    for name in (RANK_ENV, WORLD_SIZE_ENV, *start):
        if not env.get(name, "").lstrip("-").isdecimal():
            raise ValueError(f"{expected!r}: {name}={env.get(name)!r} is not a whole number")
    if expected == "job_start" and not 0 <= int(env[RANK_ENV]) < int(env[WORLD_SIZE_ENV]):
        raise ValueError(f"{expected!r}: RANK={env[RANK_ENV]} is not below WORLD_SIZE={env[WORLD_SIZE_ENV]}")
    return env


class HyperPodClient(StoreClient):
    """Regroups this rank through the vendor's agent, whose messages separate threads wait for."""

    def __init__(
        self, start_timeout_s: float = _START_TIMEOUT_S, meeting_timeout_s: float = _MEETING_TIMEOUT_S
    ) -> None:
        self._start_timeout_s, self._meeting_timeout_s = start_timeout_s, meeting_timeout_s
        try:
            package: Any = importlib.import_module(_MODULE)
            self._error: type[Exception] = package.HyperPodIPCException  # also when a time limit has passed
            self._modes = package.RestartMode
            connect = package.InProcessRestartSocketClient
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"SageMaker HyperPod's agent started this process, but {_MODULE} cannot be used for this Python "
                f"({error}): {_INSTALL}"
            ) from error
        try:
            self._agent: Any = connect()
        except (OSError, ValueError, self._error) as error:
            raise RuntimeError(f"SageMaker HyperPod's agent cannot be reached ({error}): {_HOW}") from error
        self._is_told = False  # which rank this is
        self._at_barrier = True  # of the vendor's agent, or on the way there
        self._finish_by_s = 0.0
        self._starting = -1  # the generation that the agent started last
        self._called_off = threading.Event()  # its meeting, because a fault came first
        self._host: TCPStore | None = None  # rank 0's store, which outlives the generations
        self._listener: threading.Thread | None = None
        self._way: threading.Thread | None = None  # from one generation into the next
        super().__init__(int(os.environ.get(RANK_ENV) or "-1"), 0, HashStore(), "")

    def wait_rank(self) -> None:
        """Wait until the agent says which rank this process is, and put that into ``os.environ``.

        The wait has no time limit, because a spare waits for as long as it is a spare.

        Raises:
            RankUnknownError: the agent is gone, or said something else.
        """
        while not self._is_told:
            began_s = time.monotonic()
            try:
                reply = self._agent.hyperpod_wait_rank_info(timeout=self._start_timeout_s)
                os.environ.update(_worker_envs(reply, "job_rank_info"))
            except (self._error, ValueError) as error:
                if isinstance(error, ValueError) or not self._was_timeout(began_s):
                    raise RankUnknownError(
                        f"SageMaker HyperPod's agent did not say which rank this is ({error}): {_HOW}"
                    ) from error
                logger.warning("still waiting to be told which rank this is: %s", error)
            else:
                self.rank, self._is_told = int(os.environ[RANK_ENV]), True

    def close(self) -> None:
        """Stop the client, and wait until none of its threads is inside c10d, a minute at most.

        The vendor's package has no public way to close its connection, which ends with the process.
        """
        self._stopped.set()
        if self._way is not None and not self._at_barrier:
            self._way.join(CONNECT_TIMEOUT_S)
        super().close()

    # --- what the rank says, and what the agent does ------------------------------------------------------------

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, messages.Hello) and self._listener is not None:
            self._lose("one block per process")
            raise AgentLostError("under HyperPod a process has one block: wrap everything in one HPWrapper")
        if isinstance(message, messages.Hello):
            self._listener = _in_thread(self, self._listen, "faults")
        if isinstance(message, messages.Hello | messages.Barrier):
            with self._news:
                self._at_barrier, self._starting = True, message.generation - isinstance(message, messages.Hello)
            if self._lost is None:
                self._way = _in_thread(self, self._regroup, "barrier")
        elif isinstance(message, messages.FaultReport):
            self._report(message)
        elif isinstance(message, messages.Done):
            with suppress(DistError):  # rank 0 is gone, and the store with it: the agent will say so
                super()._send(message)
            self._done, self._finish_by_s = message.generation, time.monotonic() + _FINISH_TIMEOUT_S
        elif isinstance(message, messages.Replace):
            self._send_fault("ProcessMustBeReplaced", message.reason)
        elif isinstance(message, messages.GiveUp):
            self._send_fault("RecoveryImpossible", message.reason, in_place=False)

    def _report(self, report: messages.FaultReport) -> None:
        cause, last_word = report.cause, self._count(report.cause)
        self._send_fault(cause.error, str(cause), in_place=last_word is None)
        if self.pending_fault(report.generation) is None:
            self._interrupt(report.generation, cause, last_word)
        elif last_word is not None:
            self._lose(last_word)

    def _send_fault(self, reason: str, message: str, *, in_place: bool = True) -> None:
        """Report a fault of this rank; not ``in_place``, every process of the job is replaced."""
        mode = self._modes.IN_PROCESS_RESTART if in_place else self._modes.PROCESS_LEVEL_RESTART
        try:
            self._agent.hyperpod_send_fault(self.rank, mode, reason=reason, message=message[:_MOST_CHARACTERS])
        except self._error as error:
            self._lose(f"could not report a fault: {error}")
            raise AgentLostError(f"SageMaker HyperPod's agent: could not report a fault: {error}") from error

    def _listen(self) -> None:
        """Hear the agent's fault notices until the client stops."""
        while not self._stopped.is_set():
            began_s = time.monotonic()
            try:
                kind, body = self._agent.hyperpod_wait_fault(timeout=_LISTEN_S)
            except self._error:
                if time.monotonic() - began_s < _LISTEN_S / 2:  # not a timeout: something is wrong; do not spin
                    self._stopped.wait(1.0)
                continue
            if kind == "job_fault":
                self._heard_fault(body.get("restart_count") if isinstance(body, dict) else None)

    def _heard_fault(self, restart_count: object) -> None:
        """Handle a notice; it is about the generation started last unless ``restart_count`` names an older one."""
        with self._news:
            generation = self._starting
            if self._at_barrier or (isinstance(restart_count, int) and restart_count < generation):
                logger.info("rank %d ignores the fault notice %s", self.rank, restart_count)
                return
            if self._entered != generation:
                self._coming = None
                self._called_off.set()
                return
        if self.pending_fault(generation) is None:
            self._done = None
            cause = "SageMaker HyperPod reported a fault"
            self._hear(messages.FaultNotice(generation, str(generation + 1), cause, None))

    # --- from one generation into the next, and to the end ------------------------------------------------------

    def _wait_start(self) -> dict[str, str]:
        """Report at the barrier, and return the environment of the start; a spare waits for it again and again."""
        while True:
            began_s = time.monotonic()
            try:
                return _worker_envs(self._agent.hyperpod_barrier(timeout=self._start_timeout_s), "job_start")
            except self._error as error:
                is_spare = os.environ.get("SPARE") == "True"
                if not is_spare or not self._was_timeout(began_s) or self._stopped.is_set():
                    raise RuntimeError(f"no start message arrived ({error}): {_HOW}") from error

    def _was_timeout(self, began_s: float) -> bool:
        """Return whether an error of the vendor's client is a time limit that has passed; it has no other sign."""
        return time.monotonic() - began_s > self._start_timeout_s / 2

    def _regroup(self) -> None:
        while not self._stopped.is_set():
            env, left = self._wait_start(), self._starting
            generation, rank, world_size = (int(env[name]) for name in _OF_A_START)
            if generation <= left:
                raise RuntimeError(f"a start with JOB_RESTART_COUNT={generation} came after generation {left}")
            if self._entered is not None and (rank, world_size) != (self.rank, self._world_size):
                raise RuntimeError(
                    f"rank {self.rank} of {self._world_size} would become rank {rank} of {world_size}, "
                    "whose state it does not hold"
                )
            self._called_off.clear()
            with self._news:
                self._starting, self._at_barrier = generation, False
            self._agent.hyperpod_past_rcb_barrier()  # this rank has heard of the start
            self.rank, self._world_size = rank, world_size
            self._address, self._env, self._incidents = env[MASTER_ADDR_ENV], env, generation
            if self._meet(generation, int(env[MASTER_PORT_ENV])):
                return
            with self._news:
                self._at_barrier = True
            logger.warning("rank %d goes back to the barrier: a fault came before all had met", self.rank)

    def _meet(self, generation: int, port: int) -> bool:
        """Meet the other ranks; return whether that, and no fault, came first."""
        by_s = time.monotonic() + self._meeting_timeout_s
        try:
            if self.rank > 0:
                store = _join(
                    self._address, port, by_s, lambda: self._called_off.is_set() or self._stopped.is_set()
                )
            elif self._host is None or self._host.port != port:
                store = self._host = TCPStore(
                    self._address, port, is_master=True, wait_for_workers=False, timeout=_CONNECT_LIMIT
                )
            else:
                store = self._host
            if store is not None:
                self._store = PrefixStore(f"checkpointless/{generation}", store)
                self._arrive(generation)
                self._gather_by_s = by_s
                with self._news:
                    self._coming = None if self._called_off.is_set() else generation
        except RuntimeError:
            if not self._called_off.wait(max(0.0, by_s - time.monotonic())):
                raise
        with self._news:
            while self._entered != generation and self._lost is None and not self._called_off.is_set():
                self._news.wait(0.1)
            return self._entered == generation or self._lost is not None

    def _look(self) -> None:
        """Look for the meeting and for the end; faults come from the agent."""
        try:
            super()._look()
        except DistError:  # rank 0 is gone, and the store with it: either this is the end, or the agent will say so
            now_s = time.monotonic()
            if self._coming is not None and now_s > self._gather_by_s:
                raise
            self._finish_by_s = min(self._finish_by_s, now_s + _STORE_LOST_TIMEOUT_S)
        if self._done is not None and time.monotonic() > self._finish_by_s:
            logger.warning("rank %d is done, and waits no longer for the others", self.rank)
            self._done = None
            self._hear(messages.Finish())

    def _look_for_faults(self) -> None:
        """Do nothing."""


def _join(address: str, port: int, by_s: float, is_given_up: Callable[[], bool]) -> TCPStore | None:
    """Return rank 0's store, or None if the meeting is given up first."""
    attempt = timedelta(seconds=_CONNECT_ATTEMPT_S)  # short, because nothing can stop an attempt
    while not is_given_up():
        try:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=attempt)
        except RuntimeError:
            if time.monotonic() > by_s:
                raise
        else:
            store.set_timeout(_CONNECT_LIMIT)
            return store
    return None


def _in_thread(client: HyperPodClient, work: Callable[[], None], what: str) -> threading.Thread:
    """Start a thread; if the work fails, the client's connection counts as lost."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            logger.exception("rank %d cannot go on with SageMaker HyperPod's agent", client.rank)
            client._lose(str(error) or type(error).__name__)

    thread = threading.Thread(target=run, name=f"checkpointless-hyperpod-{what}", daemon=True)
    thread.start()
    return thread
