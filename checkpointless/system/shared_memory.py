"""Removes the files in shared memory that killed processes leave.

torch makes a file in ``/dev/shm`` for each tensor that a data-loader worker hands over, opens it and removes it at
once; a worker that is killed in between leaves the file. The file's name contains the worker's pid
(``torch_<pid>_<random>_<counter>``: ``NewProcessWideShmHandle`` in torch's ``MapAllocator.cpp``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")  # shm_open(3)


def remove(pids: Iterable[int]) -> None:
    """Remove the files that processes that have ended left, unless another process uses them.

    Containers may share the folder (``--ipc=host``) but not their pids, so a file is left alone while any process
    has it open. With torch's sharing strategy ``file_system``, no process has a file open while a message carries
    it. This does not protect what another container of the same user sends from a process that had one of ``pids``
    there.
    """
    for pid in pids:
        for path in FOLDER.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):  # gone, or not ours
                if _is_unused(path):
                    path.unlink()


def _is_unused(path: Path) -> bool:
    """Return whether no process on this machine has the file open or mapped; a write lease needs that."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return False
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # an open from now on raises a harmless signal
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:  # it is in use, or the file system has no leases
        return False
    finally:
        os.close(descriptor)
    return True
