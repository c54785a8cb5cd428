"""For how long a process, and those that it started, have used no processor time and written nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

_SHARE = 0.003  # of one core; threads that only look whether something has come use less
_LEAST_CPU_S = 0.05  # the kernel counts in hundredths
_BYTES_PER_S = 32 * 1024
_WAITS = "Dt"  # for storage or a driver, and for a debugger: that is no idleness
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Process:
    parent: int
    letter: str
    cpu_s: float


class Idleness:
    """Measures how long processes have been idle, from one look to the next.

    Args:
        family: returns the processes to look at.
        own_cpu_s: returns the processor time that the looks themselves have cost these processes.
    """

    def __init__(
        self, now_s: float, family: Callable[[], Iterable[int]], own_cpu_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._family = family
        self._own_cpu_s = own_cpu_s
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
        cpu_s, nbytes, waits = -self._own_cpu_s(), 0, False
        for pid in self._family():
            process = _look(pid)
            if process is not None:
                cpu_s += process.cpu_s
                nbytes += _bytes(pid)
                waits = waits or process.letter in _WAITS
        return cpu_s, nbytes, waits


def families(roots: Collection[int]) -> dict[int, list[int]]:
    """Return, for each of some processes, itself and all that descend from it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        process = _look(int(name)) if name.isdigit() else None
        if process is not None:
            children.setdefault(process.parent, []).append(int(name))
    found = {}
    for root in roots:
        found[root] = [root]
        for pid in found[root]:  # it grows meanwhile
            found[root] += children.get(pid, [])
    return found


def _look(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    letter, parent, *rest = text.rpartition(")")[2].split()  # the name before it may contain anything
    ticks = sum(map(int, rest[9:13]))  # its own, and those of the children that it has waited for
    return _Process(int(parent), letter, ticks / _TICKS_PER_S)


def _bytes(pid: int) -> int:
    """Return how many bytes a process has written to files, pipes and sockets with ``write``."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # of another user
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("wchar:"))
