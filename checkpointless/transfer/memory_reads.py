"""Reads buckets from the memory of holders on this node, in threads, and digests them where they ended up.

A read is one copy of each byte, made by the kernel, while the holder keeps its tensors as they are. It has no
connection that an abort could cut. So whoever aborts a transfer calls :func:`stop_all`: when that returns, no read
writes to this process's tensors any more, and none begins.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from checkpointless.posix import process_memory
from checkpointless.transfer.read_plan import CALL_BYTES, Piece, calls_of, left_of

logger = logging.getLogger(__name__)

MOST_THREADS = 4
STOP_LIMIT_S = 5.0  # a call takes less than a millisecond, unless the holder's memory has to come from a disk
STALL_LIMIT_S = 60.0

_TURN_S = 0.05
_BUCKET_ALONE = errno.EFAULT  # another bucket of the holder may be readable

_all: weakref.WeakSet[MemoryReads] = weakref.WeakSet()
_all_mutex = threading.Lock()


class ReadsStopped(RuntimeError):
    """The transfer was aborted; its reads must not go on."""


@dataclass(frozen=True)
class BucketRead:
    """One bucket to read.

    Attributes:
        index: the bucket's number.
        pid: the process that holds it.
        addresses: where its parts are in that process.
        places: where they belong in this one.
        sizes: how many bytes each part has.
        owner: what keeps the memory at ``places`` allocated.
    """

    index: int
    pid: int
    addresses: Sequence[int]
    places: Sequence[int]
    sizes: Sequence[int]
    owner: object


class MemoryReads:
    """The reads of one transfer.

    Use it as a context manager, which stops them at its end. Make it before the transfer's first message, so that
    an abort finds it.

    Args:
        threads: how many threads read; default: as many as this process may use processors, but no more than 4.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._count = threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._threads: list[threading.Thread] = []
        self._due: queue.SimpleQueue[BucketRead | None] = queue.SimpleQueue()
        self._found: dict[int, int | None] = {}
        self._closed: dict[int, str] = {}
        # Its own context manager is C: an exception that another thread raises here cannot leave it locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._reading: set[int] = set()
        self._is_stopped = False
        self._calls = 0
        with _all_mutex:
            _all.add(self)

    def __enter__(self) -> MemoryReads:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self, reads: Iterable[BucketRead]) -> None:
        """Begin to read buckets in threads, in their order; the first are read while the last are being made."""
        threads: list[threading.Thread] = []
        try:
            for each in reads:
                self._due.put(each)
                if len(threads) < self._count:
                    threads.append(threading.Thread(target=self._run, name="checkpointless-read", daemon=True))
                    threads[-1].start()
        finally:
            for _ in threads:
                self._due.put(None)
            self._threads += threads

    def finish(self) -> dict[int, int | None]:
        """Wait for what was started.

        Returns:
            The digest of each bucket by its number; None: it could not be read.

        Raises:
            ReadsStopped: the transfer was aborted meanwhile.
            TimeoutError: no byte came for 60 s.
        """
        seen, since_s = -1, time.monotonic()
        while any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(_TURN_S)  # in turns, which can be interrupted
            if self._calls != seen:
                seen, since_s = self._calls, time.monotonic()
            elif time.monotonic() - since_s > STALL_LIMIT_S:
                raise TimeoutError(f"the memory of a holder on this node gave nothing for {STALL_LIMIT_S:.0f} s")
        self._threads.clear()
        if self._is_stopped:
            raise ReadsStopped("the transfer was aborted while it read from memory")
        found, self._found = self._found, {}
        return found

    def fetch(self, bucket: BucketRead) -> int | None:
        """Read one bucket in this thread, and return its digest; None: it could not be read.

        Raises:
            ReadsStopped: the transfer was aborted meanwhile.
        """
        if bucket.pid in self._closed:
            return None
        total = xxhash.xxh3_64()
        try:
            for call in calls_of(bucket.sizes, CALL_BYTES, process_memory.MOST_RANGES):
                self._read(bucket, call)
                for piece in call:
                    total.update(process_memory.view(bucket.places[piece.part] + piece.start, piece.nbytes))
        except (OSError, OverflowError) as error:
            logger.warning("bucket %d cannot be read from process %d: %s", bucket.index, bucket.pid, error)
            if not isinstance(error, OSError) or error.errno != _BUCKET_ALONE:
                self._closed[bucket.pid] = str(error)
            return None
        return total.intdigest()

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """End the reads. When this returns, none writes to memory any more.

        Args:
            limit_s: how many seconds to wait for the calls under way.

        Raises:
            RuntimeError: a call does not end; what it writes to must not be used again.
        """
        with self._mutex:
            self._is_stopped = True
            self._reading.discard(threading.get_ident())  # this thread is not in a call
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._reading, limit_s):
                raise RuntimeError(f"a read of another process's memory did not end within {limit_s:.0f} s")
        with _all_mutex:
            _all.discard(self)

    def _run(self) -> None:
        while (bucket := self._due.get()) is not None:
            self._found[bucket.index] = None
            try:
                self._found[bucket.index] = self.fetch(bucket)
            except ReadsStopped:
                return

    def _read(self, bucket: BucketRead, call: Sequence[Piece]) -> None:
        """Read the pieces of one call, with as many system calls as it takes."""
        left, own = list(call), threading.get_ident()
        while left:
            local = [(bucket.places[piece.part] + piece.start, piece.nbytes) for piece in left]
            remote = [(bucket.addresses[piece.part] + piece.start, piece.nbytes) for piece in left]
            try:
                self._enter(own)
                count = process_memory.read(bucket.pid, local, remote)
            finally:
                self._leave(own)
            if count <= 0:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            self._calls += 1
            left = left_of(left, count)

    def _enter(self, thread: int) -> None:
        """Note that a thread is about to make a system call: :meth:`stop` waits for it, and lets none follow."""
        with self._mutex:
            if self._is_stopped:
                raise ReadsStopped("the transfer was aborted")
            self._reading.add(thread)

    def _leave(self, thread: int) -> None:
        with self._mutex:
            self._reading.discard(thread)
            if self._is_stopped:
                self._changed.notify_all()


def stop_all(limit_s: float = STOP_LIMIT_S) -> None:
    """End the reads of all transfers of this process, since their connections are cut.

    Args:
        limit_s: how many seconds to wait for the calls under way, in total.

    Raises:
        RuntimeError: a call does not end; what it writes to must not be used again.
    """
    deadline_s = time.monotonic() + limit_s
    with _all_mutex:
        present = list(_all)
    for each in present:
        each.stop(max(0.0, deadline_s - time.monotonic()))
