"""What makes this process stand behind all others for a time: its priority, and its place when memory runs short.

A process without privileges may make itself nicer, but not undo it, so the priority is given up only if the kernel
gives it back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_NICE = 10  # a tenth of a share: enough to come to an end beside ranks that compute all the time
_TASKS = Path("/proc/self/task")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_OOM_FIRST, _OOM_MOST = 500, 1000


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Run this process, with the threads that it starts meanwhile, at a low priority.

    If the kernel would not give the priority back, the process only says that it computes (``SCHED_BATCH``): it
    takes no processor away from one that wakes up.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    nice = _may_come_back(before)
    with contextlib.suppress(OSError):
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, max(before, _NICE))
        else:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # the thread has ended
                if nice:
                    os.setpriority(os.PRIO_PROCESS, int(task.name), before)
                else:
                    os.sched_setscheduler(int(task.name), os.SCHED_OTHER, os.sched_param(0))


def _may_come_back(before: int) -> bool:
    """Return whether a process that made itself nicer may undo it, as a thread finds out for itself alone."""
    found = []

    def look() -> None:
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(before, _NICE))
            os.setpriority(os.PRIO_PROCESS, thread, before)
            found.append(True)

    looker = threading.Thread(target=look, name="checkpointless-priority")
    looker.start()
    looker.join()
    return bool(found)


@contextlib.contextmanager
def first_to_go() -> Iterator[None]:
    """Have the kernel kill this process before others when memory runs short."""
    try:
        before = int(_OOM_SCORE.read_text())
        _OOM_SCORE.write_text(str(min(before + _OOM_FIRST, _OOM_MOST)))
    except (OSError, ValueError) as error:
        logger.info("the place when memory runs short stays as it is: %s", error)
        yield
        return
    try:
        yield
    finally:
        try:
            _OOM_SCORE.write_text(str(before))  # what a process raised, it may lower again
        except OSError as error:
            logger.warning("this process stays the first to be killed when memory runs short: %s", error)


def private_bytes() -> int:
    """Return how many bytes of this process's memory no other process shares; 0 if the kernel does not tell."""
    try:
        rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith(("Private_Clean:", "Private_Dirty:")))
