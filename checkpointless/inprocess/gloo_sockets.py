"""Free a rank that is blocked in gloo by closing gloo's own connections.

``ProcessGroupGloo.abort()`` frees nobody: a rank that waits in a collective waits until a peer's socket closes.
So the sockets that a process group opens are noted while it is made, and shut down to abort it. Sockets of anybody
else (loggers, data loaders) are never touched.

They are shut for reading only, and kept open until all ranks have left their blocks, though gloo closes its own
descriptor. What the peer had sent is then still read, and after it the end of the stream, which fails every
pending operation; and what is written meanwhile, here or by the peer, goes nowhere but does not fail. For where a
write fails (shut for writing, or closed by the peer) gloo puts the send into its transmit queue and forgets it when
the end of the stream is read: who waits for it is not told before the group's timeout, 30 minutes by default.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import threading
from typing import Any

import torch.distributed.distributed_c10d as c10d

_FACTORY = "_new_process_group_helper"  # every process group, default or not, is made by this one function


class GlooSockets:
    """Notes which sockets process groups open, and shuts them down on demand.

    A group's sockets are known by their inode, so a descriptor number that was reused since is not mistaken.
    """

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        self._before: set[int] | None = None  # the process's sockets when the group in the making was begun
        self._kept: list[socket.socket] = []  # duplicates that keep connections open for the peer's sake
        self._mutex = threading.Lock()
        self._original: Any = None

    def install(self) -> None:
        """Begin to take notes (idempotent)."""
        if self._original is not None:
            return
        original = getattr(c10d, _FACTORY)

        @functools.wraps(original)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if not _connects(*args, **kwargs):
                return original(*args, **kwargs)
            before = set(_sockets().values())
            with self._mutex:
                self._before = before
            try:
                return original(*args, **kwargs)
            finally:
                opened = set(_sockets().values()) - before
                with self._mutex:
                    self._before = None
                    self._inodes |= opened

        self._original = original
        setattr(c10d, _FACTORY, noting)

    def uninstall(self) -> None:
        """Stop taking notes and put torch's function back."""
        if self._original is not None:
            setattr(c10d, _FACTORY, self._original)
            self._original = None

    def shutdown(self) -> int:
        """Shut down every connected TCP socket of the noted groups, of one that is being made, and of the store.

        To be repeated while the main thread is still making a group: it may go on connecting. The groups'
        connections stay open until :meth:`release`.

        Returns:
            How many sockets were shut down.
        """
        present = _sockets()
        with self._mutex:
            wanted, self._inodes = self._inodes, set()
            if self._before is not None:
                wanted = wanted | (set(present.values()) - self._before)
        store = _store_address()
        count = 0
        for descriptor, inode in present.items():
            try:
                duplicate = os.dup(descriptor)
            except OSError:  # closed since it was listed
                continue
            if _socket_inode(duplicate) != inode:  # and its number used again, by a file perhaps
                os.close(duplicate)
                continue
            candidate = socket.socket(fileno=duplicate)
            noted = inode in wanted
            if _is_connected_tcp(candidate) and (noted or _peer(candidate) == store):
                with contextlib.suppress(OSError):  # gone already
                    candidate.shutdown(socket.SHUT_RD)
                    count += 1
                    if noted:
                        self._kept.append(candidate)
                        continue
            candidate.close()
        return count

    def release(self) -> None:
        """Close what :meth:`shutdown` kept open: every rank has left its block, nobody writes any more."""
        kept, self._kept = self._kept, []
        for connection in kept:
            connection.close()


def _connects(group_size: int = -1, group_rank: int | None = -1, *_: object, **__: object) -> bool:
    """Whether a group of so many ranks, in which this one is ``group_rank``, opens connections in this process.

    Every rank goes through the making of every group, and there are about as many groups as ranks: to look at all
    descriptors for each of them would take a time that grows with the square of the ranks.
    """
    return group_rank is not None and group_size != 1


def _sockets() -> dict[int, int]:
    """Descriptor -> inode of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        inode = _socket_inode(int(name))
        if inode is not None:
            found[int(name)] = inode
    return found


def _socket_inode(descriptor: int) -> int | None:
    """The inode, or None if it is no socket or is closed. (A quarter of the time that reading its link takes.)"""
    try:
        status = os.fstat(descriptor)
    except OSError:  # the directory's own descriptor, or one closed meanwhile
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _is_connected_tcp(candidate: socket.socket) -> bool:
    try:
        return (
            candidate.family in (socket.AF_INET, socket.AF_INET6)
            and candidate.type == socket.SOCK_STREAM
            and not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    except OSError:
        return False


def _peer(candidate: socket.socket) -> int | None:
    try:
        return int(candidate.getpeername()[1])
    except OSError:
        return None


def _store_address() -> int | None:
    port = os.environ.get("MASTER_PORT")
    return int(port) if port and port.isdigit() else None
