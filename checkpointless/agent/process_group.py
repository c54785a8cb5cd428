"""A rank's process and those that it started: they are one process group, and end together."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path

from checkpointless.agent import shared_memory, temp_folder

_END_S = 0.1  # a killed process takes milliseconds


class ProcessGroup:
    """What belongs to one rank, and what that leaves.

    Args:
        leader: pid of the rank's process, which has made the group, or is about to.
        folder: where it keeps its sockets (:mod:`checkpointless.agent.temp_folder`).
    """

    def __init__(self, leader: int, folder: Path | None) -> None:
        self.leader = leader
        self._folder = folder
        self._killed = {leader}

    def kill(self) -> None:
        """SIGKILL all of them. Only while the leader has not been waited for: then its pid is free for others."""
        self._killed.update(_members(self.leader))
        with contextlib.suppress(ProcessLookupError):  # the leader has not made its group yet
            os.killpg(self.leader, signal.SIGKILL)

    def clean(self) -> None:
        """Remove what they left; the leader has been waited for, and the others been killed."""
        temp_folder.remove(self._folder, self.leader)
        deadline_s = time.monotonic() + _END_S
        for pid in self._killed:
            _wait(pid, max(0.0, deadline_s - time.monotonic()))
        shared_memory.remove(self._killed)


def _members(group: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):  # no process, or not any more
            if os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def _wait(pid: int, timeout_s: float) -> None:
    """Until the process has ended; not at all if it has been reaped, or the kernel (before 5.3) cannot tell."""
    with contextlib.suppress(OSError, AttributeError):  # the latter where Python was built without it
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(descriptor)
