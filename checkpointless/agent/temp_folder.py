"""A private folder for the sockets of the processes that ranks start.

A data-loader worker hands tensors over through a Unix socket in its temporary folder
(``multiprocessing.util.get_temp_dir``), which it removes when it ends by itself. One that is killed leaves it. So
an agent makes a folder in which each rank's process has one of its own, shared with all that it starts, and
removes that when the process has ended, however it ended.

An agent that is killed leaves its folder. It held a lock on it, which ended with it: the next agent removes folders
that nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "ckpl-"  # short: see the next line
_LONGEST_SOCKET_PATH = 107  # sockaddr_un's sun_path, without its end
_BELOW = "/4194304/pymp-12345678/listener-12345678"
_LOCK_FILE = "checkpointless.lock"
_TRIES = 5


@contextlib.contextmanager
def private_temp_folder() -> Iterator[Path | None]:
    """Make a folder for an agent's ranks; it is removed at the end, with all that is in it.

    Yields:
        The folder; None if none could be made, or its path would be too long for a socket in it: then processes
        use Python's defaults.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678{_BELOW}") > _LONGEST_SOCKET_PATH:
        logger.info("%s is too long a path for sockets below it", parent)
        yield None
        return
    try:
        _remove_abandoned(parent)
        path, lock = _make()
    except OSError as error:
        logger.warning("no temporary folder for the ranks: %s; what they leave in %s stays there", error, parent)
        yield None
        return
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def use(folder: Path | None) -> None:
    """Have this process, and all that it starts, keep multiprocessing's sockets in one of its own in ``folder``."""
    if folder is None:
        return
    own = folder / str(os.getpid())
    before = tempfile.tempdir
    try:
        own.mkdir(mode=0o700)
        tempfile.tempdir = str(own)
        util.get_temp_dir()
    except OSError as error:
        logger.warning("no temporary folder for this process: %s", error)
    finally:
        tempfile.tempdir = before


def remove(folder: Path | None, pid: int) -> None:
    """Remove what the process ``pid`` and those that it started have left; they have ended."""
    if folder is not None:
        shutil.rmtree(folder / str(pid), ignore_errors=True)


def _make() -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it."""
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            lock = os.open(path / _LOCK_FILE, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # not by us, but it is gone
        try:
            if _lock(lock) and os.fstat(lock).st_nlink > 0:
                return path, lock
        except OSError:  # a file system without locks
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            raise
        os.close(lock)  # another agent took it for abandoned in this very moment
    raise OSError(f"{_TRIES} folders were removed as soon as they were made")


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of agents that were killed."""
    for lock_file in parent.glob(f"{_PREFIX}*/{_LOCK_FILE}"):
        folder = lock_file.parent
        try:
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                continue
            lock = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # it is just being removed
        try:
            if _lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
