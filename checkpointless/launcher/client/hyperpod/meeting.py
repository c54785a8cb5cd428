"""Where ranks meet once the vendor's agent has started them, and again when they are done: a store of rank 0."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from checkpointless.launcher.client.hyperpod.replies import Start
from checkpointless.launcher.protocol.messages import Go

logger = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 3600.0  # one rank may be writing a last checkpoint
STORE_LOST_TIMEOUT_S = 60.0  # for the agent to say that rank 0 is gone
POLL_S = 0.05
CONNECT_TIMEOUT_S = 60.0
CONNECT_ATTEMPT_S = 2.0
LEAVE_TIMEOUT_S = 10.0  # for the others to hear of the end before the rank that hosts the store exits
_PREFIX = "checkpointless"


class MeetingPlace:
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
            start: what the vendor's agent said.
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
            rank: this process's rank.
            world_size: the number of ranks.
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
