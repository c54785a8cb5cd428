"""How a rank leaves its block after a fault: the generation is aborted once, and the main thread interrupted."""

from __future__ import annotations

import _thread
import logging
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FrameType
from typing import NoReturn, TypeVar

import torch

from checkpointless.inprocess.communicators.helper_thread import awaited_thread
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.exceptions import InternalError, RankShouldRestart, line_of
from checkpointless.inprocess.generation import Generation, HPState
from checkpointless.inprocess.health_check import bounded
from checkpointless.inprocess.parameter_update_lock import ParameterUpdateLock
from checkpointless.launcher.client import FaultNotice, RankClient
from checkpointless.launcher.protocol.messages import Answer
from checkpointless.observability.telemetry.event_names import EventName

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RAISE_AGAIN_S = 0.05
_SLOW_S = 1.0
_CLEANING_S = 10.0  # a data loader waits 5 s for each worker that does not end
_IMPORTING_S = 30.0  # torch's compiler takes seconds, on a busy machine many
_END_S = 5.0
_INNERMOST = 10  # number of innermost frames that are inspected
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/futures/",
    "inprocess/communicators/waits.py",
    "replication/exchange.py",
)
_WAITING_FILES = (
    "/threading.py",
    "inprocess/communicators/helper_thread.py",
)  # where a thread waits for a collective
#: Files, and functions in them (none means all), in which descriptors and child processes have no owner, either not
#: yet or not any more.
_OWNERLESS: dict[str, tuple[str, ...]] = {
    "/multiprocessing/connection.py": ("Pipe",),
    "/multiprocessing/popen_fork.py": ("_launch", "poll"),
    "/multiprocessing/popen_forkserver.py": ("_launch", "poll"),
    "/multiprocessing/popen_spawn_posix.py": ("_launch",),
    "/multiprocessing/process.py": ("start",),
    "/multiprocessing/util.py": (),
    "/weakref.py": ("__call__",),  # of what is called when an object ends, which nobody calls again
    "/torch/multiprocessing/reductions.py": ("rebuild_storage_fd",),
    "/torch/utils/data/dataloader.py": ("_shutdown_workers",),
    "/checkpointless/replication/store.py": ("_sync_folder",),
    "/checkpointless/integrations/torch/loop.py": ("_keep_again",),  # what belongs together
}


class MainThread:
    """The thread that runs the re-executable code block, and the means to make it leave the block.

    An interruption is a signal that is never sent: Python takes it as arrived, so no system call is cut short. Its
    handler sees, in the main thread, the frames that it would interrupt, and raises only if the block's frame is
    among them: code before or after the block is never hit, no matter how late it is handled. (An exception that
    another thread sets with ``PyThreadState_SetAsyncExc`` is raised wherever the thread is by then.) Python
    swallows an exception that is raised in a destructor, so the interruption is repeated until the thread has left
    the block, but not in the middle of code that releases resources.

    Raises:
        InternalError: the current thread is not the main thread, the only one that handles signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InternalError(
                "HPWrapper must be called in the main thread of the process, and this is another thread"
            )
        self._ident = threading.get_ident()
        self._entered = 0  # number of times that the block was entered
        self._to_leave = 0  # the entry that is to be left
        self._waited_s = 0.0
        self._spared_at_most_s = _CLEANING_S
        self._hearing = False
        self._putting_back = 0  # contexts of that name that the thread is in
        self._handled: BaseException | None = None  # the exception that was handled when it entered the first
        self._left = threading.Event()
        self._left.set()
        self._signal = _unused_signal()
        signal.signal(self._signal, self._hear)

    def close(self) -> None:
        """Stop interrupting and restore the signal's default action."""
        signal.signal(self._signal, signal.SIG_DFL)

    def run(self, block: Callable[[], T]) -> T:
        """Run ``block``; ``RankShouldRestart`` if it was interrupted, as code after it is never."""
        self._entered += 1
        self._putting_back = 0
        self._left.clear()
        try:
            return _the_block(block)
        finally:
            self._left.set()

    @contextmanager
    def putting_back(self) -> Iterator[None]:
        """Let ``finally`` clauses in the context run to their ends, for half of the time to leave the block."""
        if self._putting_back == 0:
            self._handled = sys.exc_info()[1]
        self._putting_back += 1
        try:
            yield
        finally:
            self._putting_back -= 1

    def interrupt(self, waited_s: float = 0.0) -> None:
        """Raise :class:`RankShouldRestart` in the block, sparing less code the longer it ``waited_s``."""
        entry = self._entered
        if self._left.is_set():
            return
        self._waited_s = waited_s
        self._to_leave = entry
        _thread.interrupt_main(self._signal)  # type: ignore[arg-type]  # typeshed knows none without a name

    def _hear(self, _: int, frame: FrameType | None) -> None:
        """Raise in the main thread, if it is in the entry to leave and in no code to spare.

        It returns at once if it runs already: handlers that come faster than one ends would be nested without
        limit.
        """
        if self._hearing:
            return
        try:
            self._hearing = True
            if self._to_leave != self._entered or not _is_in_block(frame):
                return
            spared_s = _spared_s(frame, self._spared_at_most_s)
            if self._putting_back and sys.exc_info()[1] not in (None, self._handled):
                spared_s = max(spared_s, self._spared_at_most_s)
            if self._waited_s >= spared_s:
                raise RankShouldRestart
        finally:
            self._hearing = False

    def interrupt_until_left(self, timeout_s: float, free: Callable[[float], object]) -> bool:
        """Interrupt until the block is left; return whether within ``timeout_s``; ``free`` what it blocks in."""
        began = time.monotonic()
        told = False
        self._spared_at_most_s = timeout_s / 2
        while not self._left.wait(_RAISE_AGAIN_S) and (waited := time.monotonic() - began) < timeout_s:
            free(waited)
            self.interrupt(waited)
            if waited > _SLOW_S and not told:
                told = True
                logger.warning("the main thread is slow to leave the block; it is in\n%s", self.where()[1])
        return self._left.is_set()

    def where(self) -> tuple[bool, str]:
        """Return whether the thread waits in a collective, and its stack as text, innermost call last."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return False, "the main thread has ended"
        stack = "".join(traceback.format_stack(frame))
        if _is_in_collective(frame):
            return True, stack
        helper = sys._current_frames().get(awaited_thread() or 0)
        if helper is None:
            return False, stack
        stack += "waiting for a thread that works on its behalf:\n" + "".join(traceback.format_stack(helper))
        return _is_in_collective(helper), stack


def _the_block(block: Callable[[], T]) -> T:
    """Run ``block`` in a frame by which an interruption knows that it is inside the block."""
    return block()


def _is_in_block(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _the_block.__code__:
            return True
        frame = frame.f_back
    return False


def _spared_s(frame: FrameType | None, importing_s: float) -> float:
    """Return for how many seconds the thread must not be interrupted in ``frame``; 0 almost everywhere.

    Between taking a lock and its ``try``, ``logging`` and imports would leave it taken forever. What is interrupted
    while it closes descriptors or joins a child does not do so later. A module half imported cannot register again;
    so imports are spared for ``importing_s``, except where they wait for peers.
    """
    spared_s = min(_IMPORTING_S, importing_s) if _is_importing(frame) else 0.0
    for _ in range(_INNERMOST):
        if frame is None:
            break
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "__del__" or _is_ownerless(name, function):
            return _CLEANING_S
        if name.endswith("logging/__init__.py") or (name.endswith("/threading.py") and function != "wait"):
            spared_s = max(spared_s, _SLOW_S)
        frame = frame.f_back
    return spared_s


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported in the block, and waits for no other rank."""
    if frame is not None and _is_in_collective(frame):
        return False
    while frame is not None and frame.f_code is not _the_block.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _unused_signal() -> int:
    """Return an unused real-time signal, but not the first or the last, which programs restore by name."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    raise InternalError(
        "every real-time signal has a handler already: none is left to interrupt the main thread with"
    )


def _is_ownerless(name: str, function: str) -> bool:
    return any(name.endswith(file) and (not among or function in among) for file, among in _OWNERLESS.items())


def _is_in_collective(frame: FrameType) -> bool:
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_WAITING_FILES):
        frame = frame.f_back
    return any(part in frame.f_code.co_filename for part in _COLLECTIVE_FILES)


class FaultResponder:
    """Makes the main thread leave its block when a fault notice arrives.

    ``timeout`` limits the update in progress, the abort, and the way out, each; ``raise_before_abort``: interrupt
    first; ``replace`` ends this process. ``aborted`` and ``noticed`` are the newest generations aborted, and over
    (-1); no lock for these, because an interruption could leave it taken.
    """

    def __init__(
        self,
        generation: Generation,
        client: RankClient,
        main: MainThread,
        lock: ParameterUpdateLock,
        *,
        abort: Callable[[HPState], object],
        timeout: timedelta,
        raise_before_abort: bool,
        replace: Callable[[str], NoReturn],
    ) -> None:
        self.aborted = -1
        self.noticed = -1
        self._generation = generation
        self._client = client
        self._main = main
        self._lock = lock
        self._abort_parts = abort
        self._timeout = timeout
        self._raise_before_abort = raise_before_abort
        self._replace = replace
        self._abort_mutex = threading.Lock()
        self._generation_mutex = threading.Lock()  # no fault of the old generation is handled in the new one
        self._notices: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpointless-fault-thread", daemon=True)

    def start(self) -> None:
        """Start the thread that reacts to fault notices, while the main thread may be blocked (idempotent)."""
        if self._thread.ident is None:
            self._thread.start()
        self._client.on_fault = self._on_notice

    def shutdown(self) -> None:
        self._notices.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
        self._client.on_fault = None

    def between_generations(self) -> AbstractContextManager[bool]:
        """Return the lock under which the rank goes on to the next generation; no fault is handled meanwhile."""
        return self._generation_mutex

    def abort(self, generation: int) -> bool:
        """Abort ``generation`` once, in the first thread; the other waits. False if the update did not end."""
        with self._abort_mutex:
            if self.aborted >= generation:
                return True
            with self._generation.span(EventName.ABORT):
                if not self._lock.close(self._timeout):
                    return False
                with bounded("the abort", self._timeout.total_seconds(), self._replace):
                    self._abort_parts(HPState.from_environment(generation, self._generation.incident))
            self.aborted = generation
            return True

    def adopt_incident(self) -> None:
        """Take the incident's id from the notice that has come, if one has."""
        notice = self._client.pending_fault(self._generation.number)
        if notice is not None:
            self._generation.incident = notice.incident

    def where(self, inquiry: int) -> Answer:
        """Return the answer to an inquiry of the coordinator. Runs in the thread that reads the agent."""
        in_collective, stack = self._main.where()
        return Answer(
            inquiry,
            in_collective,
            stack,
            is_async=torch.cuda.is_initialized(),
            launched=process_groups.launched(),
        )

    def _on_notice(self, notice: FaultNotice) -> None:
        """Pass a notice on to the fault thread. Runs in the thread that reads the agent."""
        self.noticed = max(self.noticed, notice.generation)
        if notice.generation >= self._generation.number:
            self._notices.put(notice.generation)

    def _on_fault(self, generation: int) -> None:
        """Free the main thread and make sure that it leaves the block. Runs in the fault thread."""
        with self._generation_mutex:
            if generation != self._generation.number:
                return
            self.adopt_incident()
            timeout_s = self._timeout.total_seconds()
            if not self._lock.close(self._timeout):
                self._replace(f"the optimizer update did not end within {timeout_s:.0f} s")
            if self._raise_before_abort:
                self._main.interrupt()
            left = self.abort(generation) and self._main.interrupt_until_left(timeout_s, process_groups.cut)
            if not left:
                self._replace(f"the main thread did not leave the block within {timeout_s:.0f} s")

    def _run(self) -> None:
        """Handle the notices in order of arrival; if one cannot be handled, this process cannot be trusted."""
        while (generation := self._notices.get()) is not None:
            try:
                self._on_fault(generation)
            except Exception as error:
                logger.exception("the fault of generation %d could not be handled", generation)
                self._replace(line_of(error))
