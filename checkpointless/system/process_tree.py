"""A rank's process and those that it started: one process group of the operating system, ended together.

A process may leave its group, but not its ancestors: whoever has adopted orphans finds all that it has led to.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Protocol

from checkpointless.system import shared_memory, temp_folder
from checkpointless.system.process_state import ProcessLook

logger = logging.getLogger(__name__)

_END_S = 0.1  # a killed process takes milliseconds
_PR_SET_CHILD_SUBREAPER = 36


class _ChildProcess(Protocol):
    """A child that can be waited for, as ``subprocess.Popen`` can."""

    @property
    def pid(self) -> int:
        """Its number."""

    def wait(self, timeout: float) -> int:
        """Return how it has ended, or raise ``subprocess.TimeoutExpired``."""


def wait_for_killed(process: _ChildProcess, timeout_s: float) -> int | None:
    """Wait for a child that was killed. One that the kernel holds, for a disk or a driver, ends later.

    Args:
        timeout_s: how long to wait.

    Returns:
        The child's return code; None if it has not ended in time.
    """
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        logger.warning("process %d did not exit within %.1f s after SIGKILL, and is left", process.pid, timeout_s)
        return None


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, instead of the machine's first."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        logger.warning("orphans are not adopted, and may be left: %s", os.strerror(ctypes.get_errno()))


def kill_descendants(pid: int) -> bool:
    """Kill all processes below ``pid``, which has adopted orphans, with SIGKILL; return whether there were any.

    Args:
        pid: this process, or a child of it that was not waited for.
    """
    killed: set[int] = set()
    while found := {each for each in _pids() if _is_below(each, pid)} - killed:
        for each in found:
            _kill_below(each, pid)
        killed |= found  # what one of them has started meanwhile is found in the next round
    return bool(killed)


class ProcessTree:
    """The processes of one rank, and the files that they leave.

    Args:
        leader: pid of the rank's process, which has made the group or is about to.
        folder: folder in which the rank keeps its sockets (:mod:`checkpointless.system.temp_folder`).
    """

    def __init__(self, leader: int, folder: Path | None) -> None:
        self.leader = leader
        self._folder = folder
        self._killed = {leader}

    def kill(self) -> None:
        """Kill all processes of the group with SIGKILL.

        Call this only before the leader has been waited for: after that its pid is free for others.
        """
        self._killed.update(_members(self.leader))
        with contextlib.suppress(ProcessLookupError):  # the leader has not made its group yet
            os.killpg(self.leader, signal.SIGKILL)

    def clean(self) -> None:
        """Remove the files that the processes left; the leader was waited for, and the others were killed."""
        temp_folder.remove(self._folder, self.leader)
        deadline_s = time.monotonic() + _END_S
        for pid in self._killed:
            _wait(pid, max(0.0, deadline_s - time.monotonic()))
        shared_memory.remove(self._killed)


def _members(group: int) -> list[int]:
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_below(pid: int, root: int) -> bool:
    while pid and (pid := ProcessLook.at(pid).parent) != root:
        pass
    return pid == root


def _kill_below(pid: int, root: int) -> None:
    """Kill a process that is below ``root``, unless its number means another process by now."""
    handle = None
    with contextlib.suppress(OSError, AttributeError):  # it has ended; or the kernel or Python has no such handles
        handle = os.pidfd_open(pid)
    try:
        if not _is_below(pid, root):
            return
        if handle is None:
            os.kill(pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError) as error:  # it has ended, or has become another user's
        logger.info("process %d is not killed: %s", pid, error)
    finally:
        if handle is not None:
            os.close(handle)


def _wait(pid: int, timeout_s: float) -> None:
    """Wait for the process to end; not at all if it was reaped, or if the kernel (before 5.3) cannot tell."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: Python was built without pidfd_open
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(descriptor)
