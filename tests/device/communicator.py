"""Provide a communicator of the test device, whose own thread does its collectives through files.

Aborting it ends what it waits for; what was aborted ends like what succeeded, with results that are not there. As
NCCL's may, an abort waits for the device, and so until every other communicator that has work is aborted, too.

As with torch's groups of NCCL's, who uses a communicator that is just being made waits for it and holds its lock,
for half an hour; an abort waits for that lock. Ranks meet at sockets of rank 0 and their own, as NCCL's do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from checkpointless.system.environment import RUN_DIR_ENV
from tests.device.device import Device, Operation

_POLL_S = 0.0005
_MAKING_S = 1800.0  # TORCH_NCCL_NONBLOCKING_TIMEOUT
_FOLDER, _ROOT = "folder", "root"
_HOST, _PORT = "127.0.0.1", struct.Struct("!H")
THREAD = "test-communicator"  # every thread of the device has this name


@contextlib.contextmanager
def _listening() -> Iterator[socket.socket]:
    """Listen as NCCL does: open on exec, and without reusing an address."""
    with socket.socket() as made:
        made.set_inheritable(True)
        made.bind((_HOST, 0))
        made.listen()
        made.setblocking(False)
        yield made


def _port(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def _hears(peer: socket.socket) -> int:
    with peer:
        peer.setblocking(True)
        return int(_PORT.unpack(peer.recv(_PORT.size, socket.MSG_WAITALL))[0])


class Communicator:
    """Represents one rank's end of a communicator, whose ranks meet at ``store``.

    Attributes:
        graphs: how many captured collectives refer to it.
    """

    of_process: ClassVar[list[Communicator]] = []

    def __init__(self, device: Device, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.aborted = False
        self.graphs = 0
        self._device, self._store = device, store
        # If communicators are made with blocking, torch does not know of one that is being made.
        self._is_known = os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") == "1"
        self._making = threading.Lock()
        self._is_connected = False
        self._folder = Path()
        self._numbers = itertools.count()
        self._calls: queue.SimpleQueue[tuple[Operation, Callable[[], None]] | None] = queue.SimpleQueue()
        self._busy = 0
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.of_process.append(self)

    @property
    def occupies_the_device(self) -> bool:
        return self._busy > 0

    # ---- what groups call

    def launch(self, operation: Operation, work: Callable[[], None]) -> None:
        lock: AbstractContextManager[object] = self._making if self._is_known else contextlib.nullcontext()
        with lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
                self._thread.start()
            self._device.wait_until(lambda: self._is_connected or self._error is not None)
        if self._error is not None:
            raise self._error
        self._device.launch(operation)
        self._busy += 1
        self._calls.put((operation, work))

    def exchange(self, mine: bytes) -> list[bytes] | None:
        """Give ``mine`` to all ranks, and return what each has given; None if it was aborted."""
        number = next(self._numbers)
        self._put(f"{number}-{self.rank}", mine)
        found = []
        for rank in range(self.size):
            path = self._folder / f"{number}-{rank}"
            if not self._wait(path.exists):
                return None
            found.append(path.read_bytes())
        # Whoever gave something to this exchange has read all of the one before.
        (self._folder / f"{number - 1}-{self.rank}").unlink(missing_ok=True)
        return found

    def send(self, peer: int, number: int, data: bytes) -> None:
        """Send ``data`` as the message of that number; it is buffered, as NCCL does with small ones."""
        self._put(f"m{number}-{self.rank}-{peer}", data)

    def receive(self, peer: int, number: int) -> bytes | None:
        path = self._folder / f"m{number}-{peer}-{self.rank}"
        if not self._wait(path.exists):
            return None
        data = path.read_bytes()
        path.unlink()
        return data

    def abort(self) -> None:
        """End what the communicator waits for, and wait for the device and for graphs to be gone.

        One that is still connecting may not be known to torch yet, so that no abort reaches it.
        """
        if not self._is_connected and not self._is_known:
            return
        if not self._making.acquire(timeout=_MAKING_S):
            raise RuntimeError("NCCL timeout")
        self._making.release()
        self.aborted = True
        while any(each.occupies_the_device and not each.aborted for each in list(self.of_process)):
            time.sleep(_POLL_S)
        while self.graphs:
            time.sleep(_POLL_S)

    def close(self) -> None:
        self._calls.put(None)
        if self in self.of_process:
            self.of_process.remove(self)

    # ---- the thread

    def _serve(self) -> None:
        try:
            self._connect()
        except Exception as error:
            self._error = RuntimeError(f"NCCL error: {error}")
        self._device.notice()
        while (call := self._calls.get()) is not None:
            operation, work = call
            if not self.aborted:
                try:
                    work()
                except Exception as error:  # else whoever waits would wait forever
                    self._device.fail(f"{type(error).__name__}: {error}")
            self._busy -= 1
            if self._device.error is None:
                self._device.finish(operation)
            del call, operation, work  # else they hold their tensors while this thread waits

    def _connect(self) -> None:
        """Meet the communicator's ranks at a socket of rank 0, which is heard of at the store."""
        with _listening() as mine:
            if self.rank == 0:
                folder = Path(os.environ[RUN_DIR_ENV]) / "device" / uuid.uuid4().hex
                folder.mkdir(parents=True)
                self._store.set(_FOLDER, str(folder))
                self._store.set(_ROOT, str(_port(mine)))
                ports = [_hears(self._accept(mine)) for _ in range(self.size - 1)]
                for port in ports:
                    socket.create_connection((_HOST, port)).close()
            else:
                while not self._store.check([_ROOT]):
                    time.sleep(_POLL_S)
                with socket.create_connection((_HOST, int(self._store.get(_ROOT)))) as root:
                    root.sendall(_PORT.pack(_port(mine)))
                self._accept(mine).close()
        self._folder = Path(self._store.get(_FOLDER).decode())
        self._is_connected = True

    def _accept(self, listening: socket.socket) -> socket.socket:
        """Wait for a peer as NCCL does, which looks for one again and again, and notices an abort."""
        while True:
            try:
                return listening.accept()[0]
            except BlockingIOError:
                if self.aborted:
                    raise
                time.sleep(_POLL_S)

    def _wait(self, holds: Callable[[], bool]) -> bool:
        """Wait until ``holds``; return False if the communicator was aborted before."""
        while not holds():
            if self.aborted or self._device.error is not None:
                return False
            time.sleep(_POLL_S)
        return True

    def _put(self, name: str, data: bytes) -> Path:
        path = self._folder / name
        made = self._folder / f"{name}.new"
        made.write_bytes(data)
        made.rename(path)
        return path
