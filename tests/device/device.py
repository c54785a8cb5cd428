"""Provide a device for the tests, with the properties of a GPU that bite a recovery.

What is launched on it is done later, by threads of the device. Whoever needs a result waits for it where it is
used, in a wait that no interruption reaches, and launches block when the queue is full. Errors are sticky.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

QUEUE = 64
_LIBC_WITH_LOCK = ctypes.PyDLL(None)  # its calls keep the interpreter lock


class Operation:
    def __init__(self, outputs: Iterable[torch.Tensor] = ()) -> None:
        self.storages = frozenset(each.untyped_storage().data_ptr() for each in outputs)
        self.is_done = False

    @classmethod
    def done(cls) -> Operation:
        operation = cls()
        operation.is_done = True
        return operation


class Device:
    """Knows what is queued on one device, and who waits for it.

    Args:
        queue: how many operations may be launched and not done; whoever launches more waits.
        holds_lock_s: for how many seconds a launch that finds no room keeps the interpreter lock, as bindings do
            that do not give it back; 0: it gives the lock back.

    Attributes:
        error: the error that every call ends with from now on, once there is one.
        capture: takes what is launched while a graph is captured; None: it is done.
        held_lock: whether a launch has kept the interpreter lock.
    """

    def __init__(self, queue: int = QUEUE, holds_lock_s: float = 0.0) -> None:
        self.error: str | None = None
        self._queue = queue
        self._holds_lock_s = holds_lock_s
        self.held_lock = False
        self.capture: Callable[[Any, Callable[[], object]], None] | None = None
        self._mutex = threading.Lock()
        self._pending: list[Operation] = []
        self._waiters: list[tuple[Callable[[], bool], threading.Lock]] = []

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def queued(self) -> list[Operation]:
        with self._mutex:
            return list(self._pending)

    def launch(self, operation: Operation) -> None:
        self._check()
        if self._holds_lock_s and len(self._pending) >= self._queue:
            _LIBC_WITH_LOCK.usleep(int(self._holds_lock_s * 1e6))
            self.held_lock = True
        self.wait_until(lambda: len(self._pending) < self._queue)
        self._check()
        with self._mutex:
            self._pending.append(operation)

    def finish(self, operation: Operation) -> None:
        with self._mutex:
            operation.is_done = True
            self._pending.remove(operation)
        self.notice()

    def fail(self, error: str) -> None:
        """Fail, as after an assertion in a kernel: nothing that is queued is done any more."""
        self.error = error
        with self._mutex:
            self._pending.clear()
        self.notice()

    def synchronize(self, operation: Operation | None = None) -> None:
        """Wait until ``operation``, or everything that is queued, is done."""
        self._check()
        self.wait_until(lambda: operation.is_done if operation is not None else not self._pending)
        self._check()

    def wait_for(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until nothing that is queued writes one of ``tensors``."""
        self._check()
        storages = {each.untyped_storage().data_ptr() for each in tensors}
        self.wait_until(lambda: not any(each.storages & storages for each in self._pending))
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"CUDA error: {self.error}")

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait in one call into C, which handles no interruption, as that of a driver does.

        What makes it hold has to call :meth:`notice`.
        """
        with self._mutex:
            if self.error is not None or holds():
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiters.append((holds, gate))
        gate.acquire()

    def notice(self) -> None:
        with self._mutex:
            ready = [each for each in self._waiters if self.error is not None or each[0]()]
            self._waiters = [each for each in self._waiters if each not in ready]
        for _, gate in ready:
            gate.release()


def event_class(device: Device) -> type:

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._before: list[Operation] = []
            self._recorded_s = 0.0

        def record(self, stream: object = None) -> None:
            self._before, self._recorded_s = device.queued(), time.perf_counter()

        def synchronize(self) -> None:
            for operation in self._before:
                device.synchronize(operation)

        def wait(self, stream: object = None) -> None:
            """Order what follows: every operation waits for its inputs as it is."""

        def query(self) -> bool:
            return all(operation.is_done for operation in self._before)

        def elapsed_time(self, end: Event) -> float:
            return (end._recorded_s - self._recorded_s) * 1e3

    return Event


def graph_class(device: Device) -> type:

    class Graph:
        """Represents a graph; it captures sums over all ranks of a group, and nothing else."""

        def __init__(self) -> None:
            self._calls: list[Callable[[], object]] = []
            self._communicators: list[Any] = []

        def capture_begin(self, *args: Any, **options: Any) -> None:
            device.capture = self.capture

        def capture(self, communicator: Any, call: Callable[[], object]) -> None:
            self._calls.append(call)
            self._communicators.append(communicator)
            communicator.graphs += 1

        def capture_end(self) -> None:
            device.capture = None

        def replay(self) -> None:
            for call in self._calls:
                call()

        def reset(self) -> None:
            for communicator in self._communicators:
                communicator.graphs -= 1
            self._calls, self._communicators = [], []

        def __del__(self) -> None:
            self.reset()

    return Graph


class Memory:
    """Counts the bytes of all storages that live, also of those that a GPU's host would keep: there is one memory.

    Attributes:
        limit: how many bytes there are; None: as many as the machine has.
        held: bytes that are held.
        most: most bytes that were held at once since the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.held = self.most = 0
        self._mutex = threading.RLock()  # a storage may end while another is counted
        self._sizes: dict[int, int] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, if it is a new one or has another size than before."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._mutex:
            known = self._sizes.get(key)
            if known == size:
                return
            if known is None:
                weakref.finalize(storage, self._ended, key)
            self._sizes[key] = size
            self.held += size - (known or 0)
            self.most = max(self.most, self.held)
            held = self.held
        if self.limit is not None and held > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {held} bytes are held, and there are {self.limit}")

    def reset_peak(self) -> None:
        with self._mutex:
            self.most = self.held

    def _ended(self, key: int) -> None:
        with self._mutex:
            self.held -= self._sizes.pop(key, 0)
