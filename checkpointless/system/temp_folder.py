"""A private folder for the sockets of the processes that ranks start, and shared memory that killed ones leave.

A data-loader worker hands tensors over through a Unix socket in its temporary folder, which it leaves if it is
killed. So an agent makes a folder with a subfolder for each rank's process and all that it starts, and removes it
when the process has ended. An agent that is killed leaves its folder, whose lock ended with it: the next agent
removes what nobody has locked. Nodes may share a file system and yet not see each other's locks, so the name of a
folder shows which kernel knows its lock.

torch makes a file in ``/dev/shm`` for each tensor that a worker hands over, opens it and removes it at once; a
worker that is killed in between leaves it. Its name contains the worker's pid (``torch_<pid>_<random>_<counter>``:
``NewProcessWideShmHandle`` in torch's ``MapAllocator.cpp``).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import util
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "ckpl-"  # short: see the next line
_LONGEST_SOCKET_PATH = 107  # sockaddr_un's sun_path, without the final zero
_BELOW = "/ckpl-kernel12345678/4194304/pymp-12345678/listener-12345678"
_LONGEST_TMPDIR = _LONGEST_SOCKET_PATH - len(_BELOW)  # bytes of the path of the folder for temporary files
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TRIES = 5
_NO_FOLDER = "no temporary folder for the ranks; sockets of killed processes may stay"


def _temporary() -> Path:
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _LONGEST_TMPDIR:
        raise OSError(f"{parent} is longer than {_LONGEST_TMPDIR} bytes, and so too long for sockets below it")
    return Path(parent)


@contextlib.contextmanager
def private_folder(find: Callable[[], Path] = _temporary, otherwise: str = _NO_FOLDER) -> Iterator[Path | None]:
    """Make a folder for this user alone below ``find()``, and remove it at the end; None if that fails."""
    try:
        path, lock = _make(find())
    except OSError as error:
        logger.warning("%s: %s", otherwise, error)
        yield None
        return
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def use(folder: Path | None) -> None:
    """Keep multiprocessing's sockets of this process and of all that it starts in a subfolder of ``folder``."""
    if folder is None:
        return
    own = folder / str(os.getpid())
    before = tempfile.tempdir
    try:
        own.mkdir(mode=0o700)
        tempfile.tempdir = str(own)
        multiprocessing.current_process()._config["tempdir"] = None  # type: ignore[attr-defined] # the parent's
        util.get_temp_dir()
    except OSError as error:
        logger.warning("no temporary folder for this process: %s", error)
    finally:
        tempfile.tempdir = before


def remove(folder: Path | None, pid: int) -> None:
    """Remove what the process ``pid`` and those that it started have left; all of them must have ended."""
    if folder is not None:
        shutil.rmtree(folder / str(pid), ignore_errors=True)


def _make(parent: Path) -> tuple[Path, int]:
    """Make a folder, and return it with the descriptor that locks it."""
    prefix = _PREFIX + _kernel()
    _remove_abandoned(parent, prefix)
    for _ in range(_TRIES):
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = _lock(path)
        except FileNotFoundError:
            continue  # another agent took it for abandoned just now
        except OSError:  # a file system without locks
            path.rmdir()
            raise
        if lock is not None:
            return path, lock
    raise OSError(f"{_TRIES} folders were removed as soon as they were made")


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders of agents that were killed."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is just being removed, or belongs to another user
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _kernel() -> str:
    """Return six characters that differ from machine to machine, and from boot to boot."""
    digest = hashlib.sha256(_BOOT_ID.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest)[:6].decode()


def _lock(folder: Path) -> int | None:
    """Lock a folder of this user until the returned descriptor is closed; None if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.lstat().st_ino != found.st_ino:
            raise FileNotFoundError(f"{folder} is another one by now")
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


SHARED_MEMORY = Path("/dev/shm")  # shm_open(3)


def remove_shared(pids: Iterable[int]) -> None:
    """Remove the files that processes that have ended left, unless another process uses them.

    Containers may share the folder (``--ipc=host``) but not their pids, so a file that a process has open is left
    alone. With torch's strategy ``file_system`` none is open while a message carries it: what another container of
    the same user sends from one of ``pids`` there is not protected.
    """
    for pid in pids:
        for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
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
