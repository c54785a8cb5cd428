"""A thread that writes for a process what may have to wait for a disk, so that no other thread of it does."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import queue
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
MAX_CHATTER_WAITING = MAX_WAITING // 2
FLUSH_S = 5.0
_AGAIN_S = 0.1  # for a disk that has let one wait for all of its time already


class Scribe:
    """Does in one thread, in the order in which they were put, things that may have to wait for a disk.

    Whoever puts something never waits. All that :meth:`put` does to what is shared are single calls of functions in
    C, so that an exception that another thread raises in the main thread at any instruction (a fault of another
    rank does that) neither leaks a lock nor starts a second writer. The thread is started by the first thing that
    is put. A fork begins anew: what was put before it is the parent's to do.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child: the queue is the parent's, and its thread is not here."""
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._at_work = _thread.allocate_lock()  # held by the thread
        self._done = 0  # how many things were
        self._missed: int | None = None  # how many were done when the last flush gave up

    def put(self, write: Callable[[], object], *, chatter: bool = False) -> bool:
        """Have something done.

        Args:
            write: does it; what it raises is logged.
            chatter: it is dropped earlier than other things if too much waits.

        Returns:
            Whether it will be done; False if too much waits already.
        """
        if self._waiting.qsize() >= (MAX_CHATTER_WAITING if chatter else MAX_WAITING):
            return False
        self._waiting.put(write)
        self._begin_work()
        return True

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until what was put before is done.

        Args:
            timeout_s: for how long at most. If the last flush has waited in vain and the disk has done nothing
                since, this one waits for a tenth of a second.

        Returns:
            Whether it is done.
        """
        if self._waiting.empty() and not self._at_work.locked():
            return True
        if self._missed == self._done:
            timeout_s = min(timeout_s, _AGAIN_S)
        written = _thread.allocate_lock()
        written.acquire()
        self._waiting.put(written.release)
        self._begin_work()
        if written.acquire(timeout=timeout_s):
            return True
        self._missed = self._done
        return False

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Flush, and have the thread end; another one is started when something is put again.

        Args:
            timeout_s: as for :meth:`flush`.

        Returns:
            As :meth:`flush`; if not, the thread ends when everything is done.
        """
        done = self.flush(timeout_s)
        if self._at_work.locked():
            self._waiting.put(None)
        return done

    def _begin_work(self) -> None:
        if self._at_work.locked():
            return
        try:
            # One call, which starts it or not; threading.Thread.start() could be interrupted half-way.
            _thread.start_new_thread(self._work, (self._waiting, self._at_work))
        except RuntimeError as error:  # no more threads, or the interpreter ends: the next one tries again
            logger.debug("no thread can be started to write events: %s", error)

    def _work(self, waiting: queue.SimpleQueue[Callable[[], object] | None], at_work: _thread.LockType) -> None:
        while at_work.acquire(blocking=False):  # or another one was started at the same time
            while (write := waiting.get()) is not None:
                try:
                    write()
                except Exception:
                    logger.exception("something could not be written")
                self._done += 1
                del write  # or it would live on while this thread waits
            at_work.release()
            if waiting.empty():  # whoever puts something now finds nobody at work, and starts a thread
                return


def flush_all(timeout_s: float = FLUSH_S) -> bool:
    """Wait until everything of this process is written, before it ends in another way than Python's own.

    Args:
        timeout_s: for how long at most, for files and for messages each.

    Returns:
        Whether it is.
    """
    return all([scribe.flush(timeout_s), herald.flush(timeout_s)])


#: The one of this process for the files of the run directory.
scribe = Scribe()
#: The one for its messages: a terminal that takes nothing any more must not keep events from a disk that does.
herald = Scribe()
for _each in (scribe, herald):
    os.register_at_fork(after_in_child=_each.forget)
atexit.register(flush_all)
