"""A child process that prints lines, and that may not end, not even killed."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_END_S = 0.5  # for a killed process to end; one that the kernel holds does not


class Lines:
    """The lines that a process prints.

    Args:
        process: the process, whose standard output is a pipe.

    Attributes:
        are_over: whether the process has closed its output.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._rest = b""
        self._waiting: list[bytes] = []
        self.are_over = False

    def until(self, deadline_s: float) -> Iterator[bytes]:
        """Yield the lines that come before the output is closed or the time is over.

        Args:
            deadline_s: when the time is over, on the monotonic clock.
        """
        while True:
            while self._waiting:
                yield self._waiting.pop(0)
            left_s = max(deadline_s - time.monotonic(), 0)
            if self.are_over or not self._poll.poll(left_s * 1000):
                return
            data = os.read(self._descriptor, 64 * 1024)
            self.are_over = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._waiting += lines


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process; one that the kernel holds is left to it, because nobody can wait for that."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.kill()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        logger.warning("the process %d does not end, not even killed", process.pid)
