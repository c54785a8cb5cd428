"""Leaves a node that is to go away: a signal or a command gives notice, and a spare takes its ranks over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from checkpointless.system.process_tree import NOT_RUN, begun_by_shell, kill_descendants

_EVERY_S = 5.0
_AGAIN_S = 60.0  # after a notice: there may be a spare by then
_LIMIT_S = 30.0  # of one run of the command


class Notice:
    """Runs a command again and again, and never waits for it; exit code 0 means that the node is to be left.

    Args:
        command: the command and its arguments; without any, nothing is run.
        say: prints, once each, that it hangs or cannot be run.
    """

    def __init__(self, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._process: subprocess.Popen[bytes] | None = None
        self._begin_at_s = self._by_s = 0.0
        self._said: set[str] = set()

    def has_come(self, now_s: float) -> bool:
        """Return whether a run has just ended with exit code 0; begin the next run when it is due."""
        if self._process is None:
            if self._command and now_s >= self._begin_at_s:
                self._begin(now_s)
            return False
        code = self._process.poll()
        if code is None and now_s >= self._by_s:
            self._warn(f"the notice command is killed, since it was not over within {_LIMIT_S:g} s")
            self._kill()
            self._by_s = float("inf")  # until the kernel lets go of it
        if code is None:
            return False
        if code in NOT_RUN:
            self._warn(f"the notice command cannot be run: {self._command[0]}")
        self._process, self._begin_at_s = None, now_s + (_EVERY_S if code else _AGAIN_S)
        return code == 0

    def close(self) -> None:
        """End what runs."""
        self._command = ()
        if self._process is not None:
            self._kill()

    def _begin(self, now_s: float) -> None:
        self._begin_at_s, self._by_s = now_s + _EVERY_S, now_s + _LIMIT_S
        nothing = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                begun_by_shell(self._command), stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
            )
        except OSError as error:
            self._warn(f"the notice command cannot be run: {error}")

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            kill_descendants(self._process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _warn(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
