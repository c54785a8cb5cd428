"""The client of a rank that torchrun, srun or a similar launcher started together with others."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from checkpointless.launcher.client.agent_client import CountingClient
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.messages import ProtocolError, RankMessage
from checkpointless.system.environment import (
    JOB_RESTART_COUNT_ENV,
    MASTER_ADDR_ENV,
    MASTER_PORT_ENV,
    RANK_ENV,
    TORCHELASTIC_RESTART_COUNT_ENV,
    TORCHELASTIC_RUN_ID_ENV,
    TORCHELASTIC_USE_AGENT_STORE_ENV,
    WORLD_SIZE_ENV,
)

logger = logging.getLogger(__name__)

POLL_S = 0.05
CONNECT_TIMEOUT_S = 60.0
FIRST_GATHER_TIMEOUT_S = 600.0
REGROUP_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 10.0  # for the others to hear of the end before the rank that hosts a store exits
_PREFIX = "checkpointless"


class StoreClient(CountingClient):
    """Regroups ranks among themselves through a c10d store, which a daemon thread polls.

    Nothing respawns a process here, so the job ends when a rank needs a new one. Rank 0 hosts a separate store for
    the process groups of each generation: keys of the previous generation would lead to addresses that are gone.

    Args:
        store: store that is shared by all ranks, and by no other job or restart of this one.
    """

    def __init__(self, rank: int, world_size: int, store: Store, address: str) -> None:
        super().__init__(rank)
        self._world_size = world_size
        self._store = store
        self._address = address
        self._env: dict[str, str] = {}  # more variables for each generation
        self._entered: int | None = None  # the generation that this rank is in, or was in last
        self._coming: int | None = None  # the generation that it waits for
        self._gather_by_s = 0.0
        self._done: int | None = None
        self._groups_store: TCPStore | None = None
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="checkpointless-store-watcher", daemon=True)
        self._watcher.start()

    @classmethod
    def from_environment(cls) -> StoreClient:
        """Connect to torchrun's store, or to one that rank 0 hosts where there is none."""
        rank, world_size = int(os.environ[RANK_ENV]), int(os.environ[WORLD_SIZE_ENV])
        address = os.environ[MASTER_ADDR_ENV]
        launcher_hosts = os.environ.get(TORCHELASTIC_USE_AGENT_STORE_ENV) == "True"
        store = TCPStore(
            address,
            int(os.environ[MASTER_PORT_ENV]),
            is_master=rank == 0 and not launcher_hosts,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        )
        restart = os.environ.get(TORCHELASTIC_RESTART_COUNT_ENV, "0")
        run = os.environ.get(TORCHELASTIC_RUN_ID_ENV, "")
        return cls(rank, world_size, PrefixStore(f"{_PREFIX}/{run}/{restart}", store), address)

    def close(self) -> None:
        """Stop polling."""
        self._stopped.set()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=5)
        self._lose("closed")

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, messages.Hello):
            self._coming = self._arrive(message.generation if self._entered is None else self._entered + 1)
        elif isinstance(message, messages.Barrier):
            self._coming = self._arrive(message.generation + 1)
        elif isinstance(message, messages.FaultReport):
            self._store.compare_set(f"fault/{message.generation}", "", messages.encode(message).decode())
        elif isinstance(message, messages.Done):
            self._store.add(f"done/{message.generation}", 1)
            self._done = message.generation
        elif isinstance(message, messages.Replace):
            reason = f"rank {self.rank} needs a new process, which only `checkpointless run` can give it"
            self._store.compare_set("end", "", f"{reason}: {message.reason}")
        elif isinstance(message, messages.GiveUp):
            self._store.compare_set("end", "", message.reason)

    def _arrive(self, generation: int) -> int:
        limit_s = FIRST_GATHER_TIMEOUT_S if self._entered is None else REGROUP_TIMEOUT_S
        self._gather_by_s = time.monotonic() + limit_s
        if self._high_water >= 0:
            self._store.append(f"committed/{generation}", f"{self._high_water} ")  # type: ignore[attr-defined]
        self._store.add(f"arrived/{generation}", 1)
        return generation

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(POLL_S):
                self._look()
        except Exception as error:
            logger.exception("rank %d can no longer hear of the others", self.rank)
            self._lose(f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        self._look_for_faults()
        if self._lost is None and (generation := self._coming) is not None:
            self._look_for_go(generation)
        if self._lost is None and (generation := self._done) is not None:
            self._look_for_finish(generation)

    def _look_for_faults(self) -> None:
        generation = self._entered
        if generation is None or self._lost is not None:
            return
        if self.pending_fault(generation) is None and self._store.check([f"fault/{generation}"]):
            report = messages.FROM_RANK.decode(self._store.get(f"fault/{generation}"))
            if not isinstance(report, messages.FaultReport):
                raise ProtocolError(f"a rank left {report.type!r} where a fault report belongs")
            self._done = None
            self._interrupt(generation, report.cause, self._count(report.cause))
        if self._store.check(["end"]):
            reason = self._store.get("end").decode()
            if self.pending_fault(generation) is None:
                self._hear(messages.FaultNotice(generation, str(self._incidents + 1), reason, None))
            self._lose(reason)

    def _look_for_go(self, generation: int) -> None:
        present = self._store.add(f"arrived/{generation}", 0)
        if present < self._world_size:
            if time.monotonic() > self._gather_by_s:
                reason = f"{present} of {self._world_size} ranks came to the barrier of generation {generation}"
                self._store.compare_set("end", "", reason)
                self._lose(reason)
            return
        if self.rank == 0:
            self._groups_store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
            told = f"committed/{generation}"
            known = self._store.get(told).decode().split() if self._store.check([told]) else []
            self._store.set(f"go/{generation}", f"{self._groups_store.port} {max(map(int, known), default=-1)}")
        elif not self._store.check([f"go/{generation}"]):
            return
        port, high_water = self._store.get(f"go/{generation}").decode().split()
        env = {
            **self._env,
            MASTER_ADDR_ENV: self._address,
            MASTER_PORT_ENV: port,
            TORCHELASTIC_USE_AGENT_STORE_ENV: "True",  # no rank of the process group hosts the store
            TORCHELASTIC_RESTART_COUNT_ENV: str(generation),
            JOB_RESTART_COUNT_ENV: str(generation),
        }
        incident = str(self._incidents) if self._incidents else None
        with self._news:
            if self._coming == generation:  # else the meeting was called off
                self._entered, self._coming = generation, None
                self._high_water = int(high_water)
                self._hear(messages.Go(generation, incident, env, int(high_water)))

    def _look_for_finish(self, generation: int) -> None:
        if self._store.add(f"done/{generation}", 0) < self._world_size:
            return
        self._done = None
        left = self._store.add(f"left/{generation}", 1)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while self.rank == 0 and left < self._world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
            left = self._store.add(f"left/{generation}", 0)
        self._hear(messages.Finish())
