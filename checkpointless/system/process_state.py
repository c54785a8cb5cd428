"""What the kernel says of a process that does not answer: whether it is stopped, blocked, computing or idle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

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


@dataclass(frozen=True)
class ProcessLook:
    """One look at a process.

    Attributes:
        letter: character code of the main thread's state, as in ``/proc/PID/stat`` (0: not known).
        cpu_ms: processor time of all its threads so far, in milliseconds.
        parent: its parent's pid (0: none, or not known).
    """

    letter: int = 0
    cpu_ms: int = 0
    parent: int = 0

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
        ticks = int(after[11]) + int(after[12])
        return cls(ord(after[0]), ticks * 1000 // _TICKS_PER_S, int(after[1]))


def state_of(first: ProcessLook, last: ProcessLook, seconds: float) -> ProcessState:
    """Return what two looks at one process tell about its state.

    Args:
        seconds: time between the two looks. A process that could run but did not is starved, and counts as busy.
    """
    letter = chr(last.letter)
    if letter in "T":
        return ProcessState.STOPPED
    if letter == "t":
        return ProcessState.TRACED
    if letter == "D":
        return ProcessState.BLOCKED
    if letter == "R" or (seconds > 0 and last.cpu_ms - first.cpu_ms >= 1000 * _BUSY_SHARE * seconds):
        return ProcessState.BUSY
    return ProcessState.IDLE if last.letter else ProcessState.UNKNOWN
