"""Runs the user's ``--device-check`` before a rank is started again, and reports a device that does not pass it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checkpointless.launcher.agent.ranks.local_rank import NodeJobState
from checkpointless.launcher.protocol.causes import signal_name
from checkpointless.launcher.protocol.node_messages import DeviceBad, NodeMessage, Spawn
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.wording import printable
from checkpointless.system.process_tree import kill_descendants, wait_for_killed

DEFAULT_DEVICE_CHECK_TIMEOUT_S = 30.0
REPORT_AGAIN_S = 10.0  # a report may be lost with the connection
_KEPT_BYTES = 4096  # of what a check prints
_PIPE_BYTES = 64 * 1024
_LONGEST_LINE = 200
_END_S = 0.5  # for a killed check to end; one that the kernel holds does not


@dataclass(frozen=True)
class DeviceCheck:
    """A command that exits with 0 if the device of a rank may be used."""

    command: tuple[str, ...]
    timeout_s: float = DEFAULT_DEVICE_CHECK_TIMEOUT_S

    @classmethod
    def of(cls, text: str, timeout_s: float) -> DeviceCheck:
        """Return the check that a command line stands for; it is divided as a shell does, and run without one.

        Raises:
            ValueError: there is no such program, or a quotation does not end.
        """
        try:
            command = tuple(shlex.split(text))
            if not command or shutil.which(command[0]) is None:
                raise ValueError("there is no such program")
        except ValueError as error:
            raise ValueError(f"the device check {text!r} cannot be run: {error}") from error
        return cls(command, timeout_s)


class _Run:
    """A run of the check, in a process group of its own, that holds a process of a rank.

    Attributes:
        why: why the device must not be used, once the check has failed.
        report_at_s: when that is to be reported, on the agent's clock.
    """

    def __init__(self, check: DeviceCheck, spawn: Spawn, env: Mapping[str, str], now_s: float) -> None:
        self.spawn, self.why, self.report_at_s = spawn, "", 0.0
        self.process = subprocess.Popen(
            check.command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._said, self._timeout_s, self.began_s = b"", check.timeout_s, now_s

    def result(self, now_s: float) -> str | None:
        """Return why the device must not be used ("": it may be); None as long as that is not known."""
        is_over = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        with contextlib.suppress(BlockingIOError):
            self._said = (self._said + os.read(self._output.fileno(), _PIPE_BYTES))[-_KEPT_BYTES:]
        if not is_over and now_s < self.began_s + self._timeout_s:
            return None
        self.kill()
        how = f"was not over within {self._timeout_s:g} s"
        if is_over:
            code = self.process.wait()
            if code == 0:
                return ""
            how = f"exited with {code}" if code > 0 else f"was killed by {signal_name(-code)}"
        lines = [printable(line, _LONGEST_LINE) for line in self._said.decode(errors="replace").split("\n")]
        return ": ".join([f"the device check {how}", *[line for line in lines if line][-1:]])

    def kill(self) -> None:
        """Kill what is left of it; its first process must not have been waited for."""
        kill_descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it may have become another user's
            os.killpg(self.process.pid, signal.SIGKILL)
        self._output.close()


class DeviceChecks:
    """Holds the starts of processes while checks run, and reports devices that must not be used.

    The first process of the job for a rank is not held: there is no reason yet to doubt its device.

    Args:
        check: the check; None: nothing is held.
    """

    def __init__(
        self,
        job: NodeJobState,
        check: DeviceCheck | None,
        report: Callable[[NodeMessage], None],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._job, self._check, self._clock = job, check, clock
        self._report, self._say = report, say
        self._held: dict[int, _Run] = {}
        self._ending: list[subprocess.Popen[bytes]] = []  # killed, and not reaped yet

    def held(self, rank: int) -> int | None:
        """Return the incarnation of the rank's process that is held; None: none is."""
        return self._held[rank].spawn.incarnation if rank in self._held else None

    def hold(self, spawn: Spawn, env: Mapping[str, str]) -> bool:
        """Begin to check the device of a rank; return whether its process is held until that is over.

        Args:
            env: environment variables of the rank, on top of those of this process.
        """
        self.drop(spawn.rank)
        if self._check is None or spawn.incarnation == 0 or spawn.anyway:
            return False
        try:
            self._held[spawn.rank] = _Run(self._check, spawn, env, self._clock())
        except OSError as error:  # which says nothing of the device
            self._say(f"rank {spawn.rank} is started without a device check, which cannot be run: {error}")
        return spawn.rank in self._held

    def passed(self) -> list[Spawn]:
        """Return the processes that may be started by now, and report those that must not be."""
        self._ending = [process for process in self._ending if process.poll() is None]
        return [held.spawn for held in list(self._held.values()) if self._has_passed(held, self._clock())]

    def drop(self, rank: int) -> bool:
        """Start no process for the rank; return whether one was held."""
        held = self._held.pop(rank, None)
        if held is not None and not held.why:
            held.kill()
            self._ending.append(held.process)
        return held is not None

    def report_again(self) -> None:
        """Report devices that must not be used anew: the coordinator does not know them."""
        for held in self._held.values():
            held.report_at_s = 0.0

    def close(self) -> None:
        """Kill and reap all checks."""
        for rank in list(self._held):
            self.drop(rank)
        for process in self._ending:
            wait_for_killed(process, _END_S)

    def _has_passed(self, held: _Run, now_s: float) -> bool:
        spawn = held.spawn
        why = held.why or held.result(now_s)
        if why is not None and not held.why:
            self._ending.append(held.process)
            seconds, told = now_s - held.began_s, {"incarnation": spawn.incarnation, "why": why}
            self._job.emit(EventName.DEVICE_CHECK, "point", rank=spawn.rank, seconds=seconds, **told)
            if why:
                held.why = why
                self._say(f"rank {spawn.rank}: {why}")
            else:
                del self._held[spawn.rank]
        if why and now_s >= held.report_at_s:
            held.report_at_s = now_s + REPORT_AGAIN_S
            self._report(DeviceBad(spawn.rank, spawn.incarnation, why))
        return why == ""
