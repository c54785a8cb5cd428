"""A thread that does a process's writes to disk, and one that relays the package's log messages."""

from __future__ import annotations

import _thread
import atexit
import copy
import functools
import logging
import os
import queue
import runpy
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from checkpointless.system.environment import LOG_LEVEL_ENV, own_run_dir

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
MAX_CHATTER_WAITING = MAX_WAITING // 2
FLUSH_S = 5.0
_Result = TypeVar("_Result")
_AGAIN_S = 0.1  # for a disk on which one flush has already timed out


class _Scribe:
    """Runs functions that may have to wait for a disk in one thread, in the order in which they were put.

    :meth:`put` never waits. It changes shared state only through single calls of C functions, so that an exception
    that another thread raises in the main thread at any instruction neither leaks a lock nor starts a second
    writer. A forked child is empty: what was put before the fork is left to the parent.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start empty in a forked child: the queue is the parent's, and its thread does not exist here."""
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._at_work = _thread.allocate_lock()  # held by the thread
        self._done = 0  # how many functions were run
        self._missed: int | None = None  # value of _done when the last flush gave up

    def put(self, write: Callable[[], object], *, chatter: bool = False) -> bool:
        """Queue ``write``; return False if too many wait, of which ``chatter`` is dropped before others."""
        if self._waiting.qsize() >= (MAX_CHATTER_WAITING if chatter else MAX_WAITING):
            return False
        self._waiting.put(write)
        self._begin_work()
        return True

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until what was put before is done; return whether it is. After a wait in vain, wait 0.1 s only."""
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
        """Flush and end the thread, or have it end later; the next call of :meth:`put` starts another one."""
        done = self.flush(timeout_s)
        if self._at_work.locked():
            self._waiting.put(None)
        return done

    def _begin_work(self) -> None:
        if self._at_work.locked():
            return
        try:
            # This single call starts the thread or fails; threading.Thread.start() could be interrupted half-way.
            _thread.start_new_thread(self._work, (self._waiting, self._at_work))
        except RuntimeError as error:  # no more threads, or the interpreter ends: the next call tries again
            logger.debug("no thread can be started to write events: %s", error)

    def _work(self, waiting: queue.SimpleQueue[Callable[[], object] | None], at_work: _thread.LockType) -> None:
        while at_work.acquire(blocking=False):  # fails if another thread was started at the same time
            is_late = waiting.empty()  # that other thread has done everything, and may have been told to end
            while not is_late and (write := waiting.get()) is not None:
                try:
                    write()
                except Exception:
                    logger.exception("something could not be written")
                self._done += 1
                del write  # otherwise it would live on while this thread waits
            at_work.release()
            if waiting.empty():  # a put() from now on finds no thread at work and starts one
                return


def flush_all(timeout_s: float = FLUSH_S) -> bool:
    """Wait until all writes of this process are done, before it ends in another way than Python's normal exit."""
    return all([scribe.flush(timeout_s), herald.flush(timeout_s)])


#: The scribe of this process for the files of the run directory.
scribe = _Scribe()
#: The scribe of this process for its messages: a blocked terminal must not keep events from a disk that works.
herald = _Scribe()
for _each in (scribe, herald):
    os.register_at_fork(after_in_child=_each.forget)
atexit.register(flush_all)


def in_thread(work: Callable[[], _Result], name: str) -> Future[_Result]:
    """Run a function that a disk may hold up in a daemon thread, and return its result to come."""
    result: Future[_Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:  # noqa: BLE001 - the edge of the thread: whoever waits raises it
            result.set_exception(error)

    threading.Thread(target=run, name=f"checkpointless-{name}", daemon=True).start()
    return result


_formatter = logging.Formatter()


class LogRelay(logging.Handler):
    """Passes the package's messages to the handlers that would get them without it, in a thread of this process.

    It has no lock that an exception raised by another thread could leave locked. In a process that is forked later,
    messages are handled at once, as without the relay.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = -1
        self._handlers: list[logging.Handler] = []
        self._propagates = True

    def createLock(self) -> None:
        self.lock = None

    def install(self) -> None:
        package = logging.getLogger(PACKAGE)
        _uninstall_relays()
        self._pid = os.getpid()
        self._handlers, self._propagates = package.handlers[:], package.propagate
        package.handlers[:] = [self]
        package.propagate = False
        herald.put(_begin)

    def uninstall(self) -> None:
        package = logging.getLogger(PACKAGE)
        if self in package.handlers:
            package.handlers[:] = self._handlers
            package.propagate = self._propagates

    def __enter__(self) -> LogRelay:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.uninstall()
        herald.close()

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass ``record`` on without waiting. A record that comes while thousands wait for a disk is lost."""
        if os.getpid() != self._pid:
            self._pass_on(record)
            return True
        told = copy.copy(record)  # the message as it is now, without the objects it refers to
        told.msg, told.args = record.getMessage(), None
        if record.exc_info:
            told.exc_text = record.exc_text or _formatter.formatException(record.exc_info)
            told.exc_info = None
        return herald.put(functools.partial(self._pass_on, told), chatter=record.levelno < logging.WARNING)

    def _pass_on(self, record: logging.LogRecord) -> None:
        handlers = [*self._handlers, *(logging.getLogger().handlers if self._propagates else ())]
        if not handlers and logging.lastResort is not None:
            handlers = [logging.lastResort]
        for handler in handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def _uninstall_relays() -> None:
    """Uninstall the relay of the process that this one was forked from, which hides the handlers that there are."""
    for relay in [each for each in logging.getLogger(PACKAGE).handlers if isinstance(each, LogRelay)]:
        relay.uninstall()


def _begin() -> None:
    """Do nothing; queued so that the thread starts at once, and not with the first message."""


# --- The log level of ranks and agents (``--log-level``) ----------------------------------------------------------

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PACKAGE = "checkpointless"


def apply_log_level() -> None:
    """Write the package's messages in this process to standard error, if a level was asked for; without a relay."""
    _uninstall_relays()
    level = LEVELS.get(os.environ.get(LOG_LEVEL_ENV, ""))
    if level is None:
        return
    package = logging.getLogger(PACKAGE)
    package.setLevel(level)
    if not package.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        package.addHandler(handler)
        package.propagate = False


# --- Full tracebacks, one file per rank and generation -----------------------------------------------------------

_PACKAGE = Path(__file__).parents[2]

TRACEBACKS_DIR = "tracebacks"


def without_own_frames(error: BaseException) -> BaseException:
    """Cut from a traceback the frames of the package and runpy that led to the user's code, if that was reached."""
    first = error.__traceback__
    while first is not None and _is_own(first.tb_frame.f_code):
        first = first.tb_next
    if first is not None or isinstance(error, SyntaxError):  # a script that cannot be compiled has no frame
        error.__traceback__ = first
    return error


def _is_own(code: types.CodeType) -> bool:
    return code.co_filename.startswith((f"{_PACKAGE}{os.sep}", "<frozen ")) or code.co_filename == runpy.__file__


def traceback_path(run_dir: Path, generation: int, rank: int) -> Path:
    """Return the path of the traceback of what ``rank`` raised in ``generation``, if it raised anything."""
    return run_dir / TRACEBACKS_DIR / f"generation-{generation}-rank-{rank}.txt"


def keep_traceback(generation: int, rank: int, text: str) -> None:
    """Queue a traceback to be written into this process's run directory, if it has one; never wait for the disk."""
    run_dir = own_run_dir()
    if run_dir is None:
        return
    if not scribe.put(functools.partial(_write, traceback_path(run_dir, generation, rank), rank, text)):
        logger.warning("rank %d: its traceback is not written, since too much waits for the disk\n%s", rank, text)


def _write(path: Path, rank: int, text: str) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, errors="backslashreplace")
    except OSError as error:
        logger.warning("rank %d: its traceback could not be written: %s\n%s", rank, error, text)
