"""Free a rank that is blocked in gloo, or in making a communicator of NCCL's, by shutting down their own sockets.

``ProcessGroupGloo.abort()`` does not free a rank that waits in a collective: it waits until a peer's socket closes.
The sockets that a process group opens are therefore recorded while the group is created, and shut down to abort it.
Other sockets (of loggers, data loaders) are never touched, also if another thread opens them at that time: Python's
sockets, and most of other libraries', are closed on exec, while gloo's and NCCL's are not. Gloo's connections also
reuse addresses on the side that connects, which a client's do not.

The sockets are shut down for reading only, and kept open until all ranks have left their blocks, although gloo
closes its own descriptor. What the peer has sent is then still read, followed by the end of the stream, which fails
every pending operation. What is written meanwhile, by this rank or by the peer, is lost but does not fail. If a
write failed (because the socket is shut down for writing, or closed by the peer), gloo would put the send into its
transmit queue and forget it when it reads the end of the stream; its waiter would not be notified before the
group's timeout, 30 minutes by default.

NCCL's sockets are left to ``ncclCommAbort``, except those at which a communicator in the making awaits its peers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator

from checkpointless.system.environment import MASTER_PORT_ENV

_BACKEND = 3  # the place of this argument of torch's factory of groups


class GlooSockets:
    """Records which sockets process groups open, and shuts them down on demand.

    A group's sockets are identified by their inodes, so a descriptor number that has been reused is not mistaken.
    """

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        # This process's sockets before the group that is being created, and whether only gloo makes it.
        self._before: tuple[set[int], bool] | None = None
        self._kept: dict[int, socket.socket] = {}  # duplicates that keep connections open for the peer, by inode
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def noting(self, *args: object, **kwargs: object) -> Iterator[None]:
        """Record the sockets that are opened in this context.

        Args:
            *args: the arguments of torch's factory of groups, which is called in the context.
            **kwargs: its keyword arguments.
        """
        if not _connects(*args, **kwargs):
            yield
            return
        before, gloo = set(_sockets().values()), _is_gloos(*args, **kwargs)
        with self._mutex:
            self._before = before, gloo
        try:
            yield
        finally:
            opened: set[int] = set()
            try:
                opened = _opened(_sockets(), before, gloo)
            finally:  # else every socket that is opened later would be taken for one of this group
                with self._mutex:
                    self._before = None
                    self._inodes |= opened

    def shutdown(self, unmet: bool = False) -> int:
        """Shut down every connected TCP socket of the recorded groups, of a group being created, and of the store.

        Repeat the call while the main thread is still creating a group, because it may continue to connect. The
        groups' connections stay open until :meth:`release`; each is shut down and kept once, however often this is
        called.

        Args:
            unmet: whether those at which communicators of NCCL's await their peers are shut down, too.

        Returns:
            The number of sockets that were shut down.
        """
        present = _sockets()
        with self._mutex:
            wanted = set(self._inodes)
            if self._before is not None:
                wanted |= _opened(present, *self._before)
        count = 0
        for _, inode, candidate in self._duplicates(present):
            noted = inode in wanted
            if _is_connected_tcp(candidate) and (noted or _is_stores(candidate)):
                with contextlib.suppress(OSError):  # it is closed already
                    candidate.shutdown(socket.SHUT_RD)
                    count += 1
                    if noted:
                        self._kept[inode] = candidate
                        continue
            candidate.close()
        return count + (self._shutdown_unmet() if unmet else 0)

    def _shutdown_unmet(self) -> int:
        """Shut down every socket of NCCL's that listens, and to which nobody is connected (idempotent).

        There a communicator in the making awaits a peer that may be lost. torch holds the communicator's lock
        meanwhile (``NCCLComm::waitReady``), which an abort waits for, until ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` or,
        if making it blocks, forever. If the wait fails, torch raises and gives the lock back.

        NCCL's sockets stay open on exec and, unlike gloo's and other servers', reuse no address. Those of its
        communicators that are made have connections; its RAS thread must not be there (``NCCL_RAS_ENABLE``).
        """
        met: set[int] = set()
        listening: list[socket.socket] = []
        for descriptor, _, candidate in self._duplicates(_sockets()):
            if _is_connected_tcp(candidate):
                with contextlib.suppress(OSError):
                    met.add(candidate.getsockname()[1])
            elif _is_backends(descriptor, gloo=False) and _is_nccls_server(candidate):
                listening.append(candidate)
                continue
            candidate.close()
        count = 0
        for each in listening:
            with each, contextlib.suppress(OSError):  # it is closed already
                if each.getsockname()[1] not in met:
                    each.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def _duplicates(self, present: dict[int, int]) -> Iterator[tuple[int, int, socket.socket]]:
        """Yield the descriptor, the inode and a duplicate of each socket that is not kept open already."""
        for descriptor, inode in present.items():
            if inode in self._kept:
                continue
            try:
                duplicate = os.dup(descriptor)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                continue  # it was closed after it was listed
            if _socket_inode(duplicate) == inode:
                yield descriptor, inode, socket.socket(fileno=duplicate)
            else:  # its number has been reused, perhaps by a file
                os.close(duplicate)

    def release(self) -> None:
        """Close what :meth:`shutdown` kept open, once every rank has left its block and no rank writes any more."""
        with self._mutex:
            self._inodes.clear()  # of groups that are destroyed
        kept, self._kept = self._kept, {}
        for connection in kept.values():
            connection.close()


def _connects(group_size: object = -1, group_rank: object = -1, *_: object, **__: object) -> bool:
    """Return whether a group of ``group_size`` ranks, of which this is ``group_rank``, opens connections here.

    Every rank takes part in the creation of every group, and there are about as many groups as ranks: inspecting
    all descriptors for each group would take time that grows with the square of the number of ranks.
    """
    return group_rank is not None and group_size != 1


def _is_gloos(*args: object, **kwargs: object) -> bool:
    """Return whether gloo alone opens the connections of a group that torch's factory makes of these arguments."""
    backend = args[_BACKEND] if len(args) > _BACKEND else kwargs.get("backend")
    return str(backend).lower() in ("gloo", "cpu:gloo")


def _opened(present: dict[int, int], before: set[int], gloo: bool) -> set[int]:
    """Return the inodes of the sockets that a group has opened.

    Args:
        present: the inodes of this process's sockets, by descriptor.
        before: the inodes of those that there were before.
        gloo: whether gloo alone makes the group.
    """
    return {
        inode
        for descriptor, inode in present.items()
        if inode not in before and _is_backends(descriptor, gloo) and _socket_inode(descriptor) == inode
    }


def _is_backends(descriptor: int, gloo: bool) -> bool:
    """Return whether a socket may be a backend's, and is not one of another thread that opens it at the same time.

    Args:
        gloo: whether it can only be gloo's.
    """
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
            return False
        if not gloo:
            return True
        looked_at = socket.socket(fileno=descriptor)
    except OSError:  # it was closed after it was listed
        return False
    try:
        return bool(looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
    except OSError:
        return False
    finally:
        looked_at.detach()  # it is not this one's to close


def _sockets() -> dict[int, int]:
    """Return the inode of every socket of this process, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        inode = _socket_inode(int(name))
        if inode is not None:
            found[int(name)] = inode
    return found


def _socket_inode(descriptor: int) -> int | None:
    """Return the inode of ``descriptor``, or None if it is not a socket or is closed.

    This takes a quarter of the time that reading the descriptor's link takes.
    """
    try:
        status = os.fstat(descriptor)
    except OSError:  # the descriptor of the directory itself, or one that was closed meanwhile
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _is_stores(candidate: socket.socket) -> bool:
    """Return whether a socket is connected to the store of this generation, which its port tells."""
    try:
        return str(candidate.getpeername()[1]) == os.environ.get(MASTER_PORT_ENV)
    except OSError:
        return False


def _is_connected_tcp(candidate: socket.socket) -> bool:
    try:
        return (
            candidate.family in (socket.AF_INET, socket.AF_INET6)
            and candidate.type == socket.SOCK_STREAM
            and not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    except OSError:
        return False


def _is_nccls_server(candidate: socket.socket) -> bool:
    """Return whether a socket of a backend listens as NCCL's do."""
    try:
        return (
            candidate.family in (socket.AF_INET, socket.AF_INET6)
            and bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            and not candidate.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        )
    except OSError:
        return False
