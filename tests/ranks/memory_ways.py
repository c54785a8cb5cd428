"""Ways in which the memory of another process may be read, or not, played in the ranks of test_transfer.py."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checkpointless.environment import MEMORY_READS_ENV
from checkpointless.posix import process_memory
from checkpointless.posix.process_memory import Range

Read = Callable[[int, Sequence[Range], Sequence[Range]], int]

_SECRET_BYTES = 32
_read: Read = process_memory.read


def take(way: str, holders: Sequence[int], rank: int) -> None:
    """Let this rank find its kernel or its peers in a state.

    Args:
        way: ``read``: all is as it is; ``sockets``: reads are switched off; ``refused``: the kernel forbids them;
            ``revoked``: it forbids them after a while; ``torn``: it gives what is asked for in parts; ``holes``:
            each second read finds no memory; ``damaging``: a bit flips in what is read first; ``wrong``: no holder
            has the secret that it told; ``apart``: the last holder is on another node.
        holders: the ranks that hold the state.
        rank: this one.
    """
    module: Any = process_memory
    reads: dict[str, Read] = {
        "refused": _refused,
        "revoked": _nth(lambda number: number > 3, _refused),
        "torn": _nth(lambda number: True, _torn),
        "holes": _nth(lambda number: number % 2 == 0, _not_there),
        "damaging": _nth(lambda number: number == 1, _damaging),
    }
    if way == "sockets":
        os.environ[MEMORY_READS_ENV] = "0"
    elif way in reads:
        module.read = reads[way]
    elif way == "wrong":
        module.Secret = _ForgottenSecret
    elif way == "apart" and rank == holders[-1]:
        module.pid_space = lambda: "another node"
    else:
        assert way in ("read", "apart"), way


def kill_at_call(number: int, pid: int) -> None:
    """Kill a process, whichever is read then, before a call is made, and go on when it is gone.

    Args:
        number: which call, from 1.
        pid: the process; this one ends at once.
    """

    def kill(*arguments: Any) -> int:
        if pid == os.getpid():
            os._exit(9)
        os.kill(pid, signal.SIGKILL)
        while _is_there(pid):
            time.sleep(0.001)
        return _read(*arguments)

    module: Any = process_memory
    module.read = _nth(lambda each: each == number, kill)


class _ForgottenSecret(process_memory.Secret):
    def __init__(self) -> None:
        super().__init__()
        self.text = "02" * _SECRET_BYTES


def _nth(chosen: Callable[[int], bool], other: Read) -> Read:
    """Return a read of which the chosen calls, counted from 1 without those of secrets, are ``other``."""
    calls = 0

    def read(pid: int, local: Sequence[Range], remote: Sequence[Range]) -> int:
        nonlocal calls
        if sum(size for _, size in remote) == _SECRET_BYTES:
            return _read(pid, local, remote)
        calls += 1
        return (other if chosen(calls) else _read)(pid, local, remote)

    return read


def _refused(pid: int, local: Sequence[Range], remote: Sequence[Range]) -> int:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _not_there(pid: int, local: Sequence[Range], remote: Sequence[Range]) -> int:
    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def _torn(pid: int, local: Sequence[Range], remote: Sequence[Range]) -> int:
    ((here, size), (there, _)) = local[0], remote[0]
    return _read(pid, [(here, (size + 1) // 2)], [(there, (size + 1) // 2)])


def _damaging(pid: int, local: Sequence[Range], remote: Sequence[Range]) -> int:
    count = _read(pid, local, remote)
    first = ctypes.c_uint8.from_address(local[0][0])
    first.value ^= 1
    return count


def _is_there(pid: int) -> bool:
    """Return whether the process has memory, which a zombie has not."""
    try:
        return not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return False
