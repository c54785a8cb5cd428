"""Processes that a job starts: what the kernel says of them, and how all that they have led to is ended.

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
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from checkpointless.system import temp_folder

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_ORPHAN_EXIT_CODE = 1
_BUSY_SHARE = 0.2  # of one core; the idle threads of a framework use less
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessState(Enum):
    """The reasons why a process may be silent."""

    UNKNOWN = "no sign of life"
    STOPPED = "stopped by a signal"
    TRACED = "held by a debugger"
    BLOCKED = "blocked in the kernel, by storage for instance"
    BUSY = "computing"
    IDLE = "idle"


_STATES = {"T": ProcessState.STOPPED, "t": ProcessState.TRACED, "D": ProcessState.BLOCKED}


@dataclass(frozen=True)
class ProcessLook:
    """One look at a process: code of its state as in ``/proc/PID/stat`` (0: not known), and processor time.

    ``family_ms`` includes the children that it has waited for.
    """

    letter: int = 0
    cpu_ms: int = 0
    parent: int = 0
    family_ms: int = 0

    @classmethod
    def at(cls, pid: int | None) -> ProcessLook:
        """Look at the process now; nothing is known of a process that does not exist."""
        if pid is None:
            return cls()
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return cls()
        after = text.rpartition(")")[2].split()  # the name before it may contain anything
        own, family = (sum(map(int, after[11:end])) * 1000 // _TICKS_PER_S for end in (13, 15))
        return cls(ord(after[0]), own, int(after[1]), family)

    def state_since(self, first: ProcessLook, seconds: float) -> ProcessState:
        """Return what two looks show; a process that could run but did not is starved, and counts as busy."""
        letter = chr(self.letter)
        if letter in _STATES:
            return _STATES[letter]
        if letter == "R" or (seconds > 0 and self.cpu_ms - first.cpu_ms >= 1000 * _BUSY_SHARE * seconds):
            return ProcessState.BUSY
        return ProcessState.IDLE if self.letter else ProcessState.UNKNOWN


_END_S = 0.1  # a killed process takes milliseconds


def wait_for_killed(process: subprocess.Popen[bytes] | ForkedProcess, timeout_s: float) -> int | None:
    """Wait for a child that was killed, and return its code; None for one that the kernel holds."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        logger.warning("process %d did not exit within %.1f s after SIGKILL, and is left", process.pid, timeout_s)
        return None


#: Exit codes of :func:`begin_by_shell` for a program that cannot be run (POSIX).
NOT_RUN = (126, 127)


def begin_by_shell(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Begin a command, in a session of its own, without waiting for the file system of its program.

    ``subprocess`` waits until its child has become the program. Here that is the shell, which becomes the program.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@"', "sh", *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def kill_begun(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of :func:`begin_by_shell`, which was not waited for, with all that it has led to."""
    kill_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have become another user's
        os.killpg(process.pid, signal.SIGKILL)


def kill_descendants(pid: int) -> bool:
    """Kill all processes below ``pid``, this process or a child; return whether there were any."""
    killed: set[int] = set()
    while found := {each for each in _pids() if _is_below(each, pid)} - killed:
        for each in found:
            _kill_below(each, pid)
        killed |= found  # what one of them has started meanwhile is found in the next round
    return bool(killed)


class ProcessTree:
    """The processes of one rank below ``leader``, whose group it makes, and the sockets that they leave."""

    def __init__(self, leader: int, folder: Path | None) -> None:
        self.leader = leader
        self._folder = folder
        self._killed = {leader}

    def kill(self) -> None:
        """Kill all processes of the group, before the leader was waited for: then its pid is free for others."""
        self._killed.update(_members(self.leader))
        with contextlib.suppress(ProcessLookupError):  # the leader has not made its group yet
            os.killpg(self.leader, signal.SIGKILL)

    def clean(self) -> None:
        """Remove the files that the processes left; the leader was waited for, and the others were killed."""
        temp_folder.remove(self._folder, self.leader)
        deadline_s = time.monotonic() + _END_S
        for pid in self._killed:
            _wait(pid, max(0.0, deadline_s - time.monotonic()))
        temp_folder.remove_shared(self._killed)


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
    """Wait for the process to end; not at all if it was reaped, or if the kernel (before 5.3) does not know."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: Python was built without pidfd_open
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1000)
        finally:
            os.close(descriptor)


_SHARE = 0.003  # of one core; threads that only look whether something has come use less
_LEAST_CPU_S = 0.05  # the kernel counts in hundredths
_BYTES_PER_S = 32 * 1024
_WAITS = "Dt"  # for storage or a driver, and for a debugger: that is no idleness


class Idleness:
    """Measures how long the processes that ``family`` returns have been idle, from one look to the next."""

    def __init__(self, now_s: float, family: Callable[[], Iterable[int]]) -> None:
        self._family = family
        self._since_s = now_s
        self._cpu_s, self._bytes, _ = self._used()

    def seconds(self, now_s: float) -> float:
        """Look at the processes, and return for how many seconds they have been idle."""
        cpu_s, nbytes, waits = self._used()
        passed_s = now_s - self._since_s
        worked = abs(cpu_s - self._cpu_s) >= max(_LEAST_CPU_S, _SHARE * passed_s)  # less: one of them has ended
        moved = abs(nbytes - self._bytes) >= _BYTES_PER_S * max(1.0, passed_s)
        if worked or moved or waits:
            self._since_s, self._cpu_s, self._bytes = now_s, cpu_s, nbytes
        return now_s - self._since_s

    def _used(self) -> tuple[float, int, bool]:
        """Return the processor time and bytes that the processes have used so far, and whether one waits."""
        pids = list(self._family())
        looks = [ProcessLook.at(pid) for pid in pids]
        cpu_s = sum(look.family_ms for look in looks) / 1000
        return cpu_s, sum(map(_bytes, pids)), any(chr(look.letter) in _WAITS for look in looks)


def families(roots: Collection[int]) -> dict[int, list[int]]:
    """Return, for each of some processes, itself and all that descend from it."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        children.setdefault(ProcessLook.at(pid).parent, []).append(pid)
    found = {}
    for root in roots:
        found[root] = [root]
        for pid in found[root]:  # it grows meanwhile
            found[root] += children.get(pid, [])
    return found


def _bytes(pid: int) -> int:
    """Return how many bytes a process has written to files, pipes and sockets with ``write``."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # of another user
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


_POLL_S = 0.01


class ForkedProcess:
    """Runs ``function`` in a fork of this process, in a separate session, and exits with the code that it returns.

    This process must have no thread but the calling one, and no CUDA context.
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
        """Wait for the child to end, or raise ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the child if it still runs."""
        self.send(signal.SIGKILL)


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal ``by`` when its parent ends, for whatever reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the kernel was asked
        os._exit(_ORPHAN_EXIT_CODE)


def _disown_finalizers() -> None:
    """Leave the parent's objects (temporary directories, say) to the parent's exit."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
