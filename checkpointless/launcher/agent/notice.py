"""Leaves a node that is to go away: a signal or a command gives notice, and a spare takes its ranks over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from checkpointless.observability.telemetry.scribe import in_thread
from checkpointless.system.process_tree import kill_descendants

_EVERY_S = 5.0
_AGAIN_S = 60.0  # after a notice: there may be a spare by then
_LIMIT_S = 30.0  # of one run of the command


class Notice:
    """Runs a command again and again, and never waits for it; exit code 0 means that the node is to be left.

    It is started in a thread, since a program on a file system that has stalled is not started until that is over.

    Args:
        command: the command and its arguments; without any, nothing is run.
        say: prints, once each, that it hangs or cannot be run.
    """

    def __init__(self, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._run: Future[subprocess.Popen[bytes]] | None = None
        self._begin_at_s = self._by_s = 0.0
        self._said: set[str] = set()

    def has_come(self, now_s: float) -> bool:
        """Return whether a run has just ended with exit code 0; begin the next run when it is due."""
        if self._command and self._run is None and now_s >= self._begin_at_s:
            self._run, self._by_s = in_thread(self._start, "notice"), now_s + _LIMIT_S
            return False
        if self._run is None:
            return False
        code = self._code()
        if code is None and now_s >= self._by_s:
            self._warn(f"the notice command is killed, since it was not over within {_LIMIT_S:g} s")
            self._kill()
            self._by_s = now_s + _LIMIT_S  # the kernel may not have let it begin, or end
        if code is None:
            return False
        self._run, self._begin_at_s = None, now_s + (_EVERY_S if code else _AGAIN_S)
        return code == 0

    def close(self) -> None:
        """End what runs."""
        self._command = ()
        self._kill()

    def _start(self) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        return subprocess.Popen(
            self._command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )

    def _code(self) -> int | None:
        """Return how the run has ended; None if it has not."""
        if self._run is None or not self._run.done():
            return None
        try:
            return self._run.result().poll()
        except OSError as error:
            self._warn(f"the notice command cannot be run: {error}")
            return -1

    def _kill(self) -> None:
        """Kill the run, unless it has ended or not begun."""
        if self._run is not None and self._run.done() and self._code() is None:
            pid = self._run.result().pid
            kill_descendants(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _warn(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
