"""The owner of a generation's process groups: how they are made, aborted, held, destroyed and released."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators import waits
from checkpointless.inprocess.exceptions import RankShouldRestart
from checkpointless.system import nccl
from checkpointless.system.environment import (
    MASTER_PORT_ENV,
    TORCH_DIST_USE_NCCL2_ENV,
    TORCH_DISTRIBUTED_DEBUG_ENV,
    own_rank,
)
from checkpointless.system.patches import Patch, Patches

logger = logging.getLogger(__name__)

_BACKEND = 3  # the place of this argument of torch's factory of groups


class _GlooSockets:
    """Records which sockets process groups open, and shuts them down on demand.

    ``ProcessGroupGloo.abort()`` does not free a rank in a collective, which waits until a peer's socket closes. So
    a group's sockets are recorded by inode while it is created. Others (of loggers, data loaders) are never
    touched: Python's, and most libraries', are closed on exec, while gloo's and NCCL's are not, and gloo's reuse
    addresses on the side that connects.

    They are shut down for reading only, and kept open until all ranks have left their blocks: what the peer has
    sent is still read, then the end of the stream fails every pending operation. If a write failed instead, gloo
    would forget a send in its transmit queue, and its waiter would last until the group's timeout, 30 minutes by
    default.

    NCCL's are left to ``ncclCommAbort``, except those at which a communicator in the making awaits its peers.
    """

    def __init__(self) -> None:
        self._inodes: set[int] = set()
        # This process's sockets before the group that is being created, and whether only gloo makes it.
        self._before: tuple[set[int], bool] | None = None
        self._kept: dict[int, socket.socket] = {}  # duplicates that keep connections open for the peer, by inode
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def noting(self, *args: object, **kwargs: object) -> Iterator[None]:
        """Record the sockets that are opened in this context, in which torch's factory is called so."""
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
        """Shut down the connected sockets of groups, made or in the making, and of the store; return how many.

        The main thread may go on connecting, so this is repeated; each is kept until :meth:`release`. ``unmet``:
        those at which NCCL awaits peers, too.
        """
        present = _sockets()
        with self._mutex:
            wanted = set(self._inodes)
            if self._before is not None:
                wanted |= _opened(present, *self._before)
        count = 0
        for _, inode, candidate in self._duplicates(present):
            noted = inode in wanted
            if _is_tcp(candidate, listens=False) and (noted or _is_stores(candidate)):
                with contextlib.suppress(OSError):  # it is closed already
                    candidate.shutdown(socket.SHUT_RD)
                    count += 1
                    if noted:
                        self._kept[inode] = candidate
                        continue
            candidate.close()
        return count + (self._shutdown_unmet() if unmet else 0)

    def _shutdown_unmet(self) -> int:
        """Shut down every socket of NCCL's that listens with nobody connected (idempotent).

        A communicator in the making awaits a peer there, with a lock (``NCCLComm::waitReady``) that an abort needs,
        until ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` or forever; a failed wait gives it back. NCCL's stay open on exec
        and, unlike gloo's and other servers', reuse no address; its RAS thread must not be there
        (``NCCL_RAS_ENABLE``).
        """
        met: set[int] = set()
        listening: list[socket.socket] = []
        for descriptor, _, candidate in self._duplicates(_sockets()):
            if _is_tcp(candidate, listens=False):
                with contextlib.suppress(OSError):
                    met.add(candidate.getsockname()[1])
            elif (
                _is_backends(descriptor, gloo=False)
                and _is_tcp(candidate, listens=True)
                and _option(candidate, socket.SO_REUSEADDR) is False
            ):
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
    """Return whether this rank connects in a group: all ranks make each, and to inspect takes quadratic time."""
    return group_rank is not None and group_size != 1


def _is_gloos(*args: object, **kwargs: object) -> bool:
    """Return whether gloo alone opens the connections of a group that torch's factory makes of these arguments."""
    backend = args[_BACKEND] if len(args) > _BACKEND else kwargs.get("backend")
    return str(backend).lower() in ("gloo", "cpu:gloo")


def _opened(present: dict[int, int], before: set[int], gloo: bool) -> set[int]:
    """Return the inodes in ``present`` of the sockets that a group has opened since ``before``."""
    return {
        inode
        for descriptor, inode in present.items()
        if inode not in before and _is_backends(descriptor, gloo) and _socket_inode(descriptor) == inode
    }


def _is_backends(descriptor: int, gloo: bool) -> bool:
    """Return whether a socket may be a backend's, and is not one that another thread opens at the same time."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
            return False
        if not gloo:
            return True
        looked_at = socket.socket(fileno=descriptor)
    except OSError:  # it was closed after it was listed
        return False
    try:
        return bool(_option(looked_at, socket.SO_REUSEADDR))
    finally:  # also where an interruption comes
        looked_at.detach()  # it is not this one's to close


def _sockets() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        inode = _socket_inode(int(name))
        if inode is not None:
            found[int(name)] = inode
    return found


def _socket_inode(descriptor: int) -> int | None:
    """Return the inode of an open socket, or None, in a quarter of the time that its link takes."""
    try:
        status = os.fstat(descriptor)
    except OSError:  # the descriptor of the directory itself, or one that was closed meanwhile
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _is_stores(candidate: socket.socket) -> bool:
    """Return whether a socket is connected to the store of this generation, by its port."""
    try:
        return str(candidate.getpeername()[1]) == os.environ.get(MASTER_PORT_ENV)
    except OSError:
        return False


def _is_tcp(candidate: socket.socket, listens: bool) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6) or candidate.type != socket.SOCK_STREAM:
        return False
    return _option(candidate, socket.SO_ACCEPTCONN) is listens


def _option(candidate: socket.socket, option: int) -> bool | None:
    """Return whether an option of a socket is set; None: it was closed after it was listed."""
    try:
        return bool(candidate.getsockopt(socket.SOL_SOCKET, option))
    except OSError:
        return None


class _GraphGivenUpError(RankShouldRestart):
    """A graph was replayed that was given up because of a fault."""


class _Guard:
    """Keeps a graph from being reset while it is replayed: the lock is held during both."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.is_over = False

    def reset(self, graph: Any) -> None:
        on_device = contextlib.nullcontext() if self.device is None else torch.cuda.device(self.device)
        with self.lock, on_device:
            if not self.is_over:
                self.is_over = True
                graph.reset()


class _CapturedGraphs:
    """Knows the CUDA graphs that a block has captured, and gives them up in an abort.

    ``ncclCommAbort`` waits (``commFree`` polls ``persistentRefs``) until the last graph with the communicator's
    collectives is gone, and the main thread drops the model that has them only after the abort.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._are_over = False
        self._guards: weakref.WeakKeyDictionary[Any, _Guard] = weakref.WeakKeyDictionary()

    def give_up(self) -> None:
        """Reset every graph once no thread replays it (a blocked replay ends by the abort); later ones raise."""
        with self._mutex:
            self._are_over = True
            guards = list(self._guards.items())
        for graph, guard in guards:
            guard.reset(graph)

    def begin_generation(self) -> None:
        """Keep the graphs that are captured from now on: a generation is over, and all its graphs are known."""
        with self._mutex:
            self._are_over = False

    def noting(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return torch's ``capture_end``, after which the graph is known, or given up if that is too late."""

        @functools.wraps(original)
        def capture_end(graph: Any) -> None:
            try:
                original(graph)
            finally:  # it may hold communicators also if it cannot be replayed
                guard = _Guard()
                with self._mutex:
                    self._guards[graph] = guard
                    is_late = self._are_over
                if is_late:
                    guard.reset(graph)

        return capture_end

    def replaying(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return torch's ``replay``, during which the graph, if it was captured in a block, is not reset."""

        @functools.wraps(original)
        def replay(graph: Any) -> None:
            guard = self._guards.get(graph)
            if guard is None:
                original(graph)
                return
            with guard.lock:
                if guard.is_over:
                    raise _GraphGivenUpError("this CUDA graph belongs to a generation that is over")
                original(graph)

        return replay


MOST_COUNTS = 2_000  # of which each takes about 20 bytes of a message
_MOST_MADE = 64  # a block that makes and destroys more in turn needs their descriptors
_TURN_S = 0.25
_PATIENCE_S = 1.0  # in which communicators that are made are aborted
_NCCL2_SINCE = (2, 15)  # where nothing is set, nccl means ProcessGroupNCCL2


class _ProcessGroups:
    """Owns the process groups of this process, from the first block to the end of the last.

    The order over a restart is: :meth:`abort` and :meth:`cut` in the fault thread; :meth:`hold` and :meth:`destroy`
    in the main thread, once it has left the block; :meth:`release` when all ranks have left theirs; :meth:`reap`
    when the next generation's garbage has been collected.

    ``messages`` counts how often this rank has sent to, or wanted to receive from, each rank (torch counts
    collectives only), the same at both ends: ``4/0>1`` is from rank 0 of the group that torch calls ``4`` to its
    rank 1.
    """

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        self._sockets = _GlooSockets()
        self._graphs = _CapturedGraphs()
        self._patches = Patches()
        # The newest groups that were made. C++ may have the last reference to a group that the block has destroyed,
        # as DistributedDataParallel's reducer does. The destructor is run with the interpreter's lock then, and
        # joins threads that may wait for it (https://github.com/pytorch/pytorch/issues/56297).
        self._made: deque[Any] = deque(maxlen=_MOST_MADE)

    def install(self) -> None:
        """Prepare torch and NCCL for groups that are aborted, and make their waits interruptible (idempotent)."""
        _prepare_nccl()
        _lower_debug_level()
        if self._patches.are_made:
            return
        group, graph = dist.ProcessGroup, torch.cuda.CUDAGraph
        sends, receives = functools.partial(self.counting, True), functools.partial(self.counting, False)
        self._patches.make(
            [
                *waits.patches(),
                Patch(c10d, "_new_process_group_helper", self._recorded, "it makes every process group"),
                Patch(group, "send", sends, "torch does not count messages"),
                Patch(group, "recv", receives, "torch does not count messages"),
                Patch(graph, "capture_end", self._graphs.noting, "graphs hold communicators"),
                Patch(graph, "replay", self._graphs.replaying, "graphs hold communicators"),
            ]
        )

    def uninstall(self) -> None:
        """Restore torch's functions, and hold the groups that the block has destroyed."""
        _bury([each for each in self._made if each not in c10d._world.pg_map])  # torch holds the others
        self._made.clear()
        self._patches.undo()
        self._sockets.release()

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            with self._sockets.noting(*args, **kwargs):
                made = original(*args, **kwargs)
            if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
                self._made.append(made[0])
            return made

        return make

    def counting(self, is_send: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            source, target = (group.rank(), peer) if is_send else (peer, group.rank())
            self.messages[f"{c10d._world.pg_names.get(group)}/{source}>{target}"] += 1
            return original(group, tensors, peer, *args, **kwargs)

        return counted

    def abort(self) -> None:
        """Free every thread that waits in a collective: NCCL's groups are aborted, gloo's connections cut.

        All of NCCL's at once, in a thread each: ``ncclCommAbort`` may wait for a kernel that spins until another
        group is aborted (https://github.com/NVIDIA/nccl/issues/1013), for CUDA graphs, given up meanwhile, and for
        the making of a communicator, which is cut if it does not end soon.
        """
        errors: list[Exception] = []

        def attempt(part: Callable[[], None]) -> None:
            try:
                part()
            except Exception as error:  # noqa: BLE001 - raised in the calling thread
                errors.append(error)

        threads = [
            threading.Thread(target=attempt, args=(part,), name="checkpointless-abort", daemon=True)
            for part in [*(backend.abort for backend in _nccl_backends()), self._graphs.give_up]
        ]
        for thread in threads:
            thread.start()
        attempt(self.cut)
        began_s = time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(_TURN_S)
                waited_s = time.monotonic() - began_s
                if waited_s > _PATIENCE_S:
                    attempt(functools.partial(self.cut, waited_s))
        if errors:
            raise errors[0]

    def cut(self, waited_s: float = 0.0) -> None:
        """Cut gloo's connections, also of a group in the making; after 1 s of ``waited_s`` NCCL's, too.

        Earlier, communicators in the making that are just being aborted would report it.
        """
        self._sockets.shutdown(unmet=waited_s > _PATIENCE_S)

    def launched(self) -> dict[str, int]:
        """Return how many collectives this rank has launched by group, and messages by peer.

        Ranks launch the same in the same order under the same names: whoever has launched more than a peer waits
        for it. Nothing above :data:`MOST_COUNTS`, which fit into no message: half of them could accuse the wrong
        rank.
        """
        counts = dict(self.messages)
        for group, name in list(c10d._world.pg_names.items()):
            backends = [] if group.size() == 1 else [(kind, _backend(group, kind)) for kind in ("cpu", "cuda")]
            for kind, backend in {id(backend): (kind, backend) for kind, backend in backends}.values():
                try:
                    counts[f"{name}/{kind}"] = int(backend._get_sequence_number_for_group())
                except (AttributeError, RuntimeError):  # there is none for this device, or one that does not count
                    continue
        return counts if len(counts) <= MOST_COUNTS else {}

    def hold(self) -> None:
        """Hold every group, so that no thread has to wait in its destructor."""
        _bury([*c10d._world.pg_map, *self._made])

    def destroy(self) -> None:
        """Destroy every process group, in the main thread, after the abort.

        So is what an interrupted ``init_process_group`` leaves: a rank that has counted one group more would wait
        forever under another name.
        """
        self.hold()
        if dist.is_initialized():
            dist.destroy_process_group()
        world = c10d._world
        registries: list[Any] = [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config]
        registries += [world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state]
        for registry in registries:
            registry.clear()
        world.group_count = 0
        self.messages.clear()
        self._made.clear()
        self._graphs.begin_generation()
        c10d._unregister_all_process_groups()  # the names of groups that were being made when they were interrupted
        _forget_meshes()

    def release(self) -> None:
        """Close the connections that were cut, since every rank has left its block and no rank writes any more."""
        self._sockets.release()

    @staticmethod
    def reap() -> None:
        """Release every group that nothing else refers to. Call this after the garbage collector has run."""
        index = 0
        while index < len(_buried):
            group = _buried[index]
            if sys.getrefcount(group) > _REFERENCES:
                index += 1
                continue
            holder = [_buried.pop(index)]
            del (
                group
            )  # before the thread starts: whichever thread drops the last reference waits for the destructor
            threading.Thread(target=_let_go, args=(holder,), name="checkpointless-reaper", daemon=True).start()


def _prepare_nccl() -> None:
    """Set the variables that torch and NCCL read, and check NCCL's version, unless this build of torch has none."""
    if not dist.is_nccl_available():
        return
    is_ours = TORCH_DIST_USE_NCCL2_ENV not in os.environ
    nccl.apply(os.environ)
    if is_ours and own_rank() == 0 and tuple(map(int, torch.__version__.split(".")[:2])) >= _NCCL2_SINCE:
        logger.info("nccl means torch's former ProcessGroupNCCL in this job (%s=0)", TORCH_DIST_USE_NCCL2_ENV)
    problem = nccl.problem_of_version(nccl.in_force() or torch.cuda.nccl.version())
    if problem is not None:
        logger.warning("%s", problem)


def _lower_debug_level() -> None:
    """Replace torch's level ``DETAIL`` by ``INFO``: it compares operations that only two ranks of a refill make."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        logger.warning(
            "%s=DETAIL is lowered to INFO: torch would compare how often all ranks have used a group, and a refill "
            "uses it on some ranks only",
            TORCH_DISTRIBUTED_DEBUG_ENV,
        )
        dist.set_debug_level(dist.DebugLevel.INFO)


def _forget_meshes() -> None:
    """Have torch forget DTensors' meshes, cached for equal new ones, whose names may be other groups' by then."""
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = import_module("torch.distributed.tensor.debug")
        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is not None:
            clear()


def _nccl_backends() -> list[Any]:
    found: dict[int, Any] = {}
    for group in list(c10d._world.pg_map):
        for device in ("cuda", "cpu"):
            backend = _backend(group, device)
            # What TORCH_DISTRIBUTED_DEBUG=DETAIL puts around a backend aborts nothing.
            backend = getattr(backend, "wrapped_pg", backend)
            if "nccl" in type(backend).__name__.lower():
                found[id(backend)] = backend
    return list(found.values())


def _backend(group: Any, device: str) -> Any:
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:  # the group has no backend for this kind of device
        return None


# Release the process groups of earlier generations without making any other thread wait.
#
# The destructor of a gloo group joins its threads, and a thread that waits for an operation that gloo has lost
# (see waits.py) does not end before the group's timeout, 30 minutes by default. A group is therefore held here
# until nothing else refers to it, and then released in a separate thread.
_buried: list[Any] = []
_REFERENCES = 4  # this list, the one added by _bury(), the variable of reap(), and the argument of getrefcount()


def _bury(groups: list[Any]) -> None:
    """Hold ``groups`` until ``reap`` finds no other reference, if necessary past the interpreter's end."""
    held = {id(group) for group in _buried}
    for group in groups:
        if id(group) not in held:
            held.add(id(group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _buried.append(group)


def _let_go(holder: list[Any]) -> None:
    group = holder.pop()
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
    del group  # the destructor runs here, without the GIL


#: torch registers process groups for the whole process, so one object owns them.
process_groups = _ProcessGroups()
