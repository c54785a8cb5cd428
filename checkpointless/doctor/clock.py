"""The clocks of nodes: what they are read from, whether they are synchronised, and whether they differ."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.posix.temp_folder import BOOT_ID
from checkpointless.telemetry.wording import duration

_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
#: Reading one of these is a slow access to a device; the board is stamped at every beat.
_SLOW_SOURCES = ("hpet", "acpi_pm", "pit", "jiffies")
_TIME_ERROR = 5  # of adjtimex(2): nobody synchronises the clock
#: Stages of an incident take tenths of a second; a report that puts events of several nodes in order needs as much.
MOST_APART_S = 1.0


@dataclass(frozen=True)
class Clock:
    """The clock of a node at one moment.

    Attributes:
        source: what the kernel reads it from ("": not known).
        is_synchronised: whether the kernel says that somebody synchronises it; None: it does not say.
        boot: identifier of this boot of the machine.
        stands_s: the wall clock minus the monotonic clock, in seconds: it changes when the wall clock is set.
        before_storage_s: the wall clock minus that of the file system of the run directory, in seconds; None if
            that was not looked at. A file system that takes times from its clients is always 0 s away.
    """

    source: str = ""
    is_synchronised: bool | None = None
    boot: str = ""
    stands_s: float = 0.0
    before_storage_s: float | None = None


def read(run_dir: Path | None = None) -> Clock:
    """Read the clock of this machine.

    Args:
        run_dir: folder whose file system's clock is compared with this machine's; None: none is.
    """
    try:
        source = _SOURCE.read_text().strip()
    except OSError:
        source = ""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    before = None if run_dir is None else _before_storage(run_dir)
    return Clock(source, _is_synchronised(), boot, time.time() - time.monotonic(), before)


def judge(clock: Clock, nodes: int) -> list[Finding]:
    """Return what the clock of one node means.

    Args:
        clock: the clock.
        nodes: number of nodes of the job.
    """
    findings = []
    if clock.source in _SLOW_SOURCES:
        todo = "set clocksource=tsc, if the machine's is reliable"
        seen = f"the clock source is {clock.source}, which is slow to read"
        findings.append(_finding(Severity.ADVICE, seen, str(_SOURCE), todo))
    if nodes > 1 and clock.is_synchronised is False:
        seen = "the kernel says that the clock is not synchronised"
        todo = "run chrony or another NTP client on every node"
        findings.append(_finding(Severity.ADVICE, seen, "adjtimex", todo))
    known = f"clock source {clock.source or 'not known'}"
    if clock.is_synchronised:
        known += ", synchronised"
    return findings or [_finding(Severity.OK, known, str(_SOURCE))]


def judge_step(before: Clock, now: Clock) -> list[Finding]:
    """Return whether the wall clock of a node was set between two readings of it.

    Args:
        before: the earlier reading.
        now: the later one. Readings of different boots are not compared.
    """
    if not before.boot or before.boot != now.boot:
        return []
    moved_s = now.stands_s - before.stands_s
    if abs(moved_s) <= MOST_APART_S:
        return []
    seen = f"the wall clock was set by {duration(abs(moved_s))} {'forward' if moved_s > 0 else 'back'} meanwhile"
    todo = "let NTP slew the clock; times of this run's report are wrong by that much"
    return [_finding(Severity.WARNING, seen, "wall clock against monotonic clock", todo)]


def judge_apart(clocks: dict[int, Clock]) -> list[Finding]:
    """Return whether the wall clocks of nodes differ, as far as the run directory's file system tells.

    Args:
        clocks: the clock of each node, by its number.
    """
    known = {node: clock.before_storage_s for node, clock in clocks.items() if clock.before_storage_s is not None}
    if len(known) < 2:
        return []
    low, high = min(known, key=lambda node: known[node]), max(known, key=lambda node: known[node])
    apart_s = known[high] - known[low]
    source = "each node's clock against the file system's"
    if apart_s <= MOST_APART_S:
        seen = f"clocks differ by no more than {duration(apart_s)}, as far as the file system tells"
        return [_finding(Severity.OK, seen, source)]
    seen = f"the clock of node {high} is {duration(apart_s)} ahead of that of node {low}"
    todo = "run chrony or another NTP client on every node; the report puts events in order by these clocks"
    return [_finding(Severity.WARNING, seen, source, todo)]


def _before_storage(folder: Path) -> float | None:
    """Return how far this machine's clock is ahead of the one that stamps files of a folder; None: not known."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".ckpl-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())  # else the stamp is this machine's own until the data is written back
            return time.time() - os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def _is_synchronised() -> bool | None:
    """Ask adjtimex(2), which needs no right to do so; None where it is refused."""
    timex = ctypes.create_string_buffer(512)  # struct timex; all zero: change nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    return None if state < 0 else state != _TIME_ERROR


def _finding(severity: Severity, seen: str, source: str, todo: str = "") -> Finding:
    return Finding(Family.CLOCK, severity, seen, source, todo)
