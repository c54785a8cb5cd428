"""Reads the memory of another process of this user on this machine, where the kernel allows it.

``process_vm_readv(2)`` copies from the other process's memory into this one's, once, without its help. The kernel
asks for the right to attach to the process as a debugger: same user, and what Yama, seccomp and the like leave of
it. None of that can be foreseen, so a read of a known secret is tried first (:class:`Secret`, :func:`is_held_by`).
The secret also proves that a pid means the same process at both ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

MOST_RANGES = 1024  # of one call: IOV_MAX
MOST_BYTES = 0x7FFFF000  # of one call: MAX_RW_COUNT

_SECRET_BYTES = 32
_PR_SET_PTRACER = 0x59616D61
_PYBUF_READ = 0x100
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_DESCENDANTS = "1"  # only a process's ancestors may attach to it, and the one that it names

Range = tuple[int, int]  # address and length in bytes

_libc = ctypes.CDLL(None, use_errno=True)
_readv = getattr(_libc, "process_vm_readv", None)  # None: this C library does not know it
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t


class Secret:
    """Random bytes in this process's memory. Whoever can tell them reads this process's memory.

    Attributes:
        address: where they are.
        text: what they are, hex.
    """

    def __init__(self) -> None:
        secret = os.urandom(_SECRET_BYTES)
        self._memory = ctypes.create_string_buffer(secret, _SECRET_BYTES)
        self.address = ctypes.addressof(self._memory)
        self.text = secret.hex()


def pid_space() -> str | None:
    """Return a name of the kernel and of the namespace that give this process its pid; None: they are not known.

    Processes with the same name know each other by the same pids, if no virtual machine was copied while it ran.
    """
    try:
        return f"{_BOOT.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"
    except OSError:
        return None


def is_held_by(pid: int, secret: str, address: int) -> bool:
    """Return whether this process can read ``secret`` at ``address`` in another process of its own user.

    Args:
        pid: the other process.
        secret: what should be there, hex.
        address: where it should be.
    """
    try:
        expected = bytes.fromhex(secret)
        if len(expected) != _SECRET_BYTES or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        found = ctypes.create_string_buffer(_SECRET_BYTES)
        count = read(pid, [(ctypes.addressof(found), _SECRET_BYTES)], [(address, _SECRET_BYTES)])
    except (OSError, OverflowError, ValueError):
        return False
    return count == _SECRET_BYTES and found.raw == expected


def read(pid: int, local: Sequence[Range], remote: Sequence[Range]) -> int:
    """Copy from another process's memory into this one's.

    The other process may run, be stopped or be blocked meanwhile. Other threads of this one go on.

    Args:
        pid: the other process.
        local: where to write, at most :data:`MOST_RANGES`; whoever calls keeps this memory allocated.
        remote: where to read, at most :data:`MOST_RANGES`, of the same total length, at most :data:`MOST_BYTES`.

    Returns:
        How many bytes were copied: the first ones, and fewer than asked for if what follows cannot be read.

    Raises:
        OSError: nothing could be copied: the process is gone (ESRCH), the address is not there (EFAULT), the kernel
            forbids it (EPERM, EACCES) or does not have it (ENOSYS).
        OverflowError: an address or a length is no unsigned number of the machine.
    """
    if _readv is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    here, there = _vector(local), _vector(remote)
    count = int(
        _readv(
            ctypes.c_int(pid),
            ctypes.c_void_p(here.buffer_info()[0]),
            ctypes.c_ulong(len(local)),
            ctypes.c_void_p(there.buffer_info()[0]),
            ctypes.c_ulong(len(remote)),
            ctypes.c_ulong(0),
        )
    )
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


def view(address: int, nbytes: int) -> memoryview:
    """Return this process's memory at ``address``, read-only; whoever calls keeps it allocated."""
    from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
    from_memory.restype = ctypes.py_object
    found: memoryview = from_memory(ctypes.c_void_p(address), ctypes.c_ssize_t(nbytes), ctypes.c_int(_PYBUF_READ))
    return found


def names_its_readers() -> bool:
    """Return whether the kernel lets a process be read only by one that it has named (Yama's scope 1)."""
    try:
        return _YAMA.read_text().strip() == _YAMA_DESCENDANTS
    except OSError:  # this kernel has no Yama
        return False


def name_reader(pid: int | None) -> None:
    """Let one process, and those that it started, read this one's memory, beside its ancestors.

    This replaces the process that was named before. It changes nothing without Yama.

    Args:
        pid: the process; None: no process any more.
    """
    _libc.prctl(
        ctypes.c_int(_PR_SET_PTRACER),
        ctypes.c_ulong(pid or 0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )


def _vector(ranges: Sequence[Range]) -> array[int]:
    """Return ``ranges`` as an array of ``struct iovec``, each of which is a pointer and a ``size_t``."""
    return array("L", [number for one in ranges for number in one])
