"""What follows a script's last line in a rank's process: threads and ``atexit`` are waited for, in bounded time."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing.process
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from checkpointless.launcher.protocol.board import Board
from checkpointless.observability.telemetry.scribe import flush_all
from checkpointless.system.environment import own_rank
from checkpointless.system.idleness import Idleness, families
from checkpointless.system.threads import abandoned, waited_for

DEFAULT_EXIT_GRACE_S = 30.0
_SOON_S, _LATER_S = 0.5, 2.0  # from one look to the next, in the first seconds and afterwards
_MOMENT_S = 2.0  # for threads that nobody needs any more


class ScriptEnd:
    """Ends a rank's process as the interpreter would, but for what is idle for too long.

    The interpreter is not shut down: with large frameworks loaded that takes longer than most recoveries.

    Args:
        board: the rank's board.
        limit_s: for how many seconds the process may wait and be idle.
    """

    def __init__(self, board: Board | None, limit_s: float) -> None:
        self._board = board
        self._limit_s = limit_s
        self._code = 1
        self._atexit = threading.Lock()  # held by the thread that runs what is registered, until the process ends

    def begin(self, code: int) -> None:
        """Note that the script is over; from here on, the process does not wait for what is idle for too long.

        Args:
            code: the script's exit code.
        """
        self._code = code
        if self._board is not None:
            self._board.set_exit_code(code)
        threading.Thread(target=self._watch, name="checkpointless-end", daemon=True).start()

    def finish(self) -> NoReturn:
        """Wait for threads, run what ``atexit`` has, and end the process."""
        self._do(threading._shutdown)  # type: ignore[attr-defined]  # waits for non-daemon threads
        self._run_atexit()

    def _run_atexit(self) -> NoReturn:
        with self._atexit:
            self._do(atexit._run_exitfuncs)
            self._exit()

    def _do(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
            self._code = self._code or 1

    def _exit(self) -> NoReturn:
        flush_all()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the script closed or replaced it
                stream.flush()
        os._exit(self._code)

    def _watch(self) -> NoReturn:
        """Go on when what is waited for has been idle for too long."""
        began_s = time.monotonic()
        idleness = self._idleness()
        while True:
            waited_s = time.monotonic() - began_s
            time.sleep(_SOON_S if waited_s < 2 * _MOMENT_S else _LATER_S)
            idle_s = idleness.seconds(time.monotonic())
            threads, useless = waited_for(), abandoned()
            if not self._atexit.locked() and threads and threads == useless:
                if idle_s < min(_MOMENT_S, self._limit_s) and waited_s < self._limit_s:
                    continue
                self._say(f"ends without {_named(threads)}, which an earlier entry of its block left behind")
            elif idle_s < self._limit_s:
                continue
            else:
                awaited = f": it ends without {_named(threads)}" if threads or _children() else ""
                self._say(f"has been idle for {self._limit_s:g} s since its script ended (--exit-grace){awaited}")
                faulthandler.dump_traceback(2)
            if self._atexit.locked():
                self._exit()
            threading.Thread(target=self._run_atexit, name="checkpointless-atexit", daemon=True).start()
            began_s, idleness = time.monotonic(), self._idleness()

    @staticmethod
    def _idleness() -> Idleness:
        pid = os.getpid()
        return Idleness(time.monotonic(), lambda: families([pid])[pid], time.thread_time)

    @staticmethod
    def _say(text: str) -> None:
        with contextlib.suppress(OSError):  # the script closed it
            os.write(2, f"rank {own_rank()} {text}\n".encode())


def _children() -> list[multiprocessing.process.BaseProcess]:
    """Return the processes that ``atexit`` waits for."""
    return [child for child in multiprocessing.process.active_children() if not child.daemon]


def _named(threads: set[threading.Thread]) -> str:
    """Name what the process would wait for."""
    names = [f"thread {thread.name!r} (0x{thread.ident or 0:016x})" for thread in threads]
    return ", ".join(sorted(names) + [f"process {child.name!r} (pid {child.pid})" for child in _children()])
