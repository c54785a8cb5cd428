"""Agree on whether a rank to fill reads from a holder's memory: both are on one node, and the kernel allows it.

The rank to fill (D) and a holder (S) put this into the messages of a transfer:

1. D to S: the name of the space of its pid, and its pid; or nothing, if it does not read.
2. S to D: its pid and a secret with its address, if S is in the same space; or nothing.
3. D to S: whether it could read the secret.

If it could, S keeps its tensors as they are until D says that it has everything.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from checkpointless.environment import MEMORY_READS_ENV, NO
from checkpointless.posix import process_memory
from checkpointless.transfer.wire import runs_ahead

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json, Parsed

logger = logging.getLogger(__name__)


def own_reader() -> Json:
    """Return what a rank to fill says of itself; None: everything is to come over the wire."""
    space = None if os.environ.get(MEMORY_READS_ENV) == NO or runs_ahead() else process_memory.pid_space()
    return None if space is None else {"space": space, "pid": os.getpid()}


class _NamedReader:
    """The one process that the kernel lets read this one's memory, for as long as any transfer needs it.

    What a debugger or the script had named before cannot be asked for, and is gone.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._pid = 0
        self._count = 0

    def name(self, pid: int) -> bool:
        """Let ``pid`` read, unless another process is named now; return whether it is."""
        with self._mutex:
            if self._count and pid != self._pid:
                return False
            if not self._count:
                process_memory.name_reader(pid)
            self._pid = pid
            self._count += 1
            return True

    def drop(self) -> None:
        """Undo one :meth:`name` that has returned True."""
        with self._mutex:
            self._count -= 1
            if not self._count:
                process_memory.name_reader(None)


_named = _NamedReader()


class MemoryOffers:
    """A holder's offers for the time of one transfer; there may be several at once.

    Use it as a context manager: at its end the kernel is told that nobody reads any more, where it was told at all.
    """

    def __init__(self) -> None:
        self._secret: process_memory.Secret | None = None
        self._is_named = False

    def __enter__(self) -> MemoryOffers:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_named:
            self._is_named = False
            _named.drop()

    def to(self, reader: Parsed) -> Json:
        """Return the offer to a rank that has to be filled; None: it gets everything over the wire.

        Where the kernel lets only a process read that was named, and only one, the first rank is offered it.

        Args:
            reader: what :func:`own_reader` returned there.
        """
        if reader is None or own_reader() is None or reader["space"] != process_memory.pid_space():
            return None
        if process_memory.names_its_readers():
            if self._is_named or not _named.name(int(reader["pid"])):
                return None
            self._is_named = True
        if self._secret is None:
            self._secret = process_memory.Secret()
        return {"pid": os.getpid(), "secret": self._secret.text, "address": self._secret.address}


def accepted(offer: Parsed) -> int | None:
    """Return the pid of the holder that made ``offer``, if this process can read its memory.

    Args:
        offer: what :meth:`MemoryOffers.to` returned there.
    """
    if offer is None:
        return None
    pid = int(offer["pid"])
    if process_memory.is_held_by(pid, str(offer["secret"]), int(offer["address"])):
        return pid
    logger.debug("the memory of process %d on this node cannot be read: its state comes over the wire", pid)
    return None
