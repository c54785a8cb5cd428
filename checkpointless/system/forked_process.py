"""A child forked from this process that can be waited for and killed like a ``subprocess.Popen``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence

_POLL_S = 0.01


class ForkedProcess:
    """Runs ``function`` in a fork of this process, in a separate session.

    This process must have no thread but the calling one, and no CUDA context.

    Args:
        function: what the child runs; the child exits with the code that it returns (None: 0), or 1 if it raises.
        output: the descriptor to which the child's standard output and error go.

    Attributes:
        returncode: the child's exit code, or minus the number of the signal that ended it; None while it runs.
    """

    def __init__(self, function: Callable[[], int | None], *, output: int, close: Sequence[int]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                _disown_finalizers()
                for descriptor in close:
                    os.close(descriptor)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                code = function() or 0
            except BaseException:  # noqa: BLE001 - the edge of the process: its log gets the traceback
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Return the child's return code if it has ended, else None."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the child to end.

        Args:
            timeout: how many seconds to wait.

        Raises:
            subprocess.TimeoutExpired: the child has not ended within ``timeout``.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        """Kill the child if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _disown_finalizers() -> None:
    """Leave the parent's objects (temporary directories, say) to the parent's exit."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
