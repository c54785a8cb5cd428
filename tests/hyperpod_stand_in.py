"""Stand in for the package ``hyperpod-elastic-agent``, with the names that the adapter uses, and for an agent.

The client keeps what matters of the real one's behaviour (1.1.3): a message goes on the queue of its kind; the
waits for a fault and at the barrier first drop what is queued, the wait for rank information takes the newest;
whatever goes wrong, and every time limit, is a ``HyperPodIPCException``. The messages on the wire are our own.
The real one drops a start, too, that comes while it reports at the barrier, which nobody outside it can prevent
(its own comment says so). Here that would fail tests on a busy machine, so a start is dropped before the report.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
import types
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.waiting import wait_until

MODULE = "hyperpod_elastic_agent.ipc"
SOCKET_ENV = "HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH"
_TICK_S = 0.05  # the real agent looks every --monitor-interval


class HyperPodIPCException(RuntimeError):
    pass


class RestartMode(str, Enum):
    IN_PROCESS_RESTART = "in_process_restart"
    PROCESS_LEVEL_RESTART = "process_level_restart"


class InProcessRestartSocketClient:
    """Stands in for the package's client, and connects when it is made."""

    def __init__(self) -> None:
        kinds = ("job_start", "job_fault", "job_rank_info")
        self._queues: dict[str, queue.Queue[tuple[str, Any]]] = {kind: queue.Queue() for kind in kinds}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[SOCKET_ENV])
        threading.Thread(target=self._read, daemon=True).start()
        self._say("init")

    def hyperpod_wait_rank_info(self, timeout: float | None = None) -> tuple[str, Any]:
        newest = self._drain("job_rank_info")
        return newest[-1] if newest else self._get("job_rank_info", timeout)

    def hyperpod_barrier(self, timeout: float | None = None) -> tuple[str, Any]:
        self._drain("job_start")
        self._say("at_rcb_barrier")
        return self._get("job_start", timeout)

    def hyperpod_past_rcb_barrier(self) -> None:
        self._say("past_rcb_barrier")

    def hyperpod_wait_fault(self, timeout: float | None = None) -> tuple[str, Any]:
        self._drain("job_fault")
        return self._get("job_fault", timeout)

    def hyperpod_send_fault(
        self,
        rank: int,
        restart_mode: RestartMode = RestartMode.IN_PROCESS_RESTART,
        reason: str | None = None,
        message: str | None = None,
    ) -> None:
        self._say("job_fault", rank=rank, restart_mode=restart_mode, reason=reason, message=message)

    def _say(self, kind: str, **body: Any) -> None:
        body |= {"type": kind, "local_rank": int(os.environ.get("LOCAL_RANK", "0"))}
        try:
            self._connection.sendall(json.dumps(body).encode() + b"\n")
        except OSError as error:
            raise HyperPodIPCException(f"Failed to send {kind}") from error

    def _read(self) -> None:
        for line in self._connection.makefile("rb"):
            body = json.loads(line)
            kind = body.pop("type")
            self._queues[kind].put((kind, body))

    def _drain(self, kind: str) -> list[tuple[str, Any]]:
        found = []
        while not self._queues[kind].empty():
            found.append(self._queues[kind].get())
        return found

    def _get(self, kind: str, timeout: float | None) -> tuple[str, Any]:
        try:
            return self._queues[kind].get(timeout=timeout)
        except queue.Empty:
            raise HyperPodIPCException(f"Timed out reading data from server after {timeout} seconds") from None


def module(lacking: str = "") -> types.ModuleType:
    """Return the package's module ``ipc``, without one of its names if it is to lack it."""
    ipc = types.ModuleType(MODULE)
    names = {each.__name__: each for each in (InProcessRestartSocketClient, HyperPodIPCException, RestartMode)}
    vars(ipc).update({name: each for name, each in names.items() if name != lacking})
    return ipc


def install() -> None:
    """Put the stand-in where ``importlib.import_module`` finds it."""
    sys.modules[MODULE] = module()


class Agent:
    """Stands in for the vendor's agent and its operator, for one node, in threads of the test's process.

    Attributes:
        heard: every message of a rank so far.
        restart_count: of the next start.
        envs: more for, or other than, what a start tells each rank.
        automatic: whether it starts the job when all ranks are at the barrier, and tells all of every fault.
    """

    def __init__(self, path: Path, world_size: int, automatic: bool = True) -> None:
        self.path = str(path)
        self.world_size = world_size
        self.automatic = automatic
        self.heard: list[dict[str, Any]] = []
        self.restart_count = 0
        self.envs: dict[str, str] = {}
        self.port = free_port()
        self._mutex = threading.RLock()
        self._connections: dict[int, socket.socket] = {}
        self._at_barrier: set[int] = set()
        self._running = False
        self._closed = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._look, daemon=True).start()

    def environment(self, rank: int) -> dict[str, str]:
        """Return what the agent gives a rank's process before the operator has given it a rank."""
        started = {"RANK": str(rank - self.world_size), "WORLD_SIZE": str(self.world_size), "MASTER_ADDR": ""}
        count = str(self.restart_count)
        started |= {"MASTER_PORT": "-1", "JOB_RESTART_COUNT": count, "TORCHELASTIC_RESTART_COUNT": count}
        return started | {"LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "False", SOCKET_ENV: self.path}

    def start(self) -> None:
        with self._mutex:
            self._running = True
            self._at_barrier.clear()
            self.tell("job_start")

    def fault(self) -> None:
        """Tell all ranks of a fault; the next start has the next number."""
        with self._mutex:
            self._running = False
            self.restart_count += 1
            for rank in list(self._connections):
                self.say(rank, "job_fault", restart_count=self.restart_count - 1)

    def tell(self, kind: str = "job_rank_info") -> None:
        with self._mutex:
            for rank in list(self._connections):
                env = self.environment(rank) | {"RANK": str(rank), "SPARE": "False"}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
                self.say(rank, kind, worker_envs=env | self.envs, aggregate_worker_data={})

    def say(self, rank: int, kind: str, **body: Any) -> None:
        try:
            self._connections[rank].sendall(json.dumps({"type": kind, **body}).encode() + b"\n")
        except OSError:
            self._connections.pop(rank, None)

    def count(self, kind: str) -> int:
        return sum(message["type"] == kind for message in self.heard)

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = 120) -> list[dict[str, Any]]:
        """Return all messages of ``kind``, once there are ``count``."""
        wait_until(lambda: self.count(kind) >= count, timeout_s)
        return [message for message in self.heard if message["type"] == kind]

    def close(self) -> None:
        self._closed = True
        for each in (self._server, *self._connections.values()):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        rank = -1
        with suppress(OSError):
            for line in connection.makefile("rb"):
                message = json.loads(line)
                rank = message["local_rank"]
                self._take(rank, message, connection)
        with self._mutex:
            self._at_barrier.discard(rank)
            if self._connections.get(rank) is connection:
                del self._connections[rank]
                if self.automatic and self._running:
                    self.fault()

    def _take(self, rank: int, message: dict[str, Any], connection: socket.socket) -> None:
        with self._mutex:
            kind = message["type"]
            if kind == "init":
                self._connections[rank] = connection
                if self.automatic:
                    self.tell()
            elif kind == "at_rcb_barrier":
                self._at_barrier.add(rank)
            elif kind == "job_fault" and self.automatic and self._running:
                self.fault()
            self.heard.append(message)

    def _look(self) -> None:
        while not self._closed:
            time.sleep(_TICK_S)
            with self._mutex:
                if self.automatic and len(self._at_barrier) == self.world_size:
                    self.start()
