"""The owner of a generation's process groups: how they are made, aborted, held, destroyed and released."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.environment import EAGER_INIT_ENV, TORCH_DISTRIBUTED_DEBUG_ENV, YES
from checkpointless.inprocess.communicators import nccl_settings
from checkpointless.inprocess.communicators.captured_graphs import CapturedGraphs
from checkpointless.inprocess.communicators.gloo_sockets import GlooSockets
from checkpointless.inprocess.communicators.gloo_wait import InterruptibleConnect, InterruptibleWait
from checkpointless.inprocess.communicators.shared_backends import SharedBackends
from checkpointless.inprocess.communicators.store_wait import InterruptibleStore
from checkpointless.patches import Patch, Patches

logger = logging.getLogger(__name__)

MOST_COUNTS = 2_000  # of which each takes about 20 bytes of a message


class ProcessGroups:
    """Owns the process groups of this process, from the first block to the end of the last.

    The order over a restart is: :meth:`abort` and :meth:`cut` in the fault thread; :meth:`hold` and :meth:`destroy`
    in the main thread, once it has left the block; :meth:`release` when all ranks have left theirs; :meth:`reap`
    when the next generation's garbage has been collected.

    Attributes:
        messages: counts the messages between two ranks.
    """

    def __init__(self) -> None:
        self._shared = SharedBackends()
        self._sockets = GlooSockets(self._shared)
        self.messages = PointToPointCounts()
        self._graphs = CapturedGraphs()
        self._patchers = (
            InterruptibleConnect(self._shared),
            InterruptibleWait(),
            InterruptibleStore(),
            EagerInit(),
            self._graphs,
            self.messages,
            self._shared,
        )

    def install(self) -> None:
        """Prepare torch and NCCL for groups that are aborted, and make their waits interruptible (idempotent)."""
        nccl_settings.apply_where_there_is_nccl()
        _lower_debug_level()
        self._sockets.install()
        for each in self._patchers:
            each.install()

    def uninstall(self) -> None:
        """Restore torch's functions, and hold the groups that the block has destroyed."""
        bury([each for each in self._shared.made if each not in c10d._world.pg_map])  # torch holds the others
        self._shared.made.clear()
        for each in reversed(self._patchers):
            each.uninstall()
        self._sockets.release()
        self._sockets.uninstall()

    def sharing(self, among: str = "") -> AbstractContextManager[None]:
        """Let groups of the same ranks that this thread makes in this context share gloo's connections.

        All ranks make these groups, and issue their collectives in the same order, from one thread, as NCCL demands
        it of all communicators that have a device in common. Nothing is shared outside of a block.

        Args:
            among: a name; those of another context share if it was given the same one.
        """
        return self._shared.sharing(among)

    def abort(self) -> None:
        """Free every thread that waits in a collective: NCCL's groups are aborted, gloo's connections cut.

        All groups of NCCL's are aborted at the same time, each in a thread of its own. ``ncclCommAbort`` may wait
        for the device, and so for a kernel that spins until another group is aborted, too
        (https://github.com/NVIDIA/nccl/issues/1013). It also waits for CUDA graphs, which are given up meanwhile.

        Raises:
            RuntimeError: NCCL could not abort a group, or CUDA could not reset a graph.
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
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def cut(self) -> None:
        """Cut gloo's connections, also those of a group that is just being made."""
        self._sockets.shutdown()

    def launched(self) -> dict[str, int]:
        """Return how many collectives this rank has launched in each of its groups, and messages with each peer.

        Every rank of a group launches the same collectives in the same order, and all ranks know a group by the
        same name. Whoever has launched more than a peer waits for it, wherever its main thread stands. Nothing is
        returned if there are more than :data:`MOST_COUNTS`, which would not fit into a message: half of them could
        accuse the wrong rank.
        """
        counts = dict(self.messages.counts)
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
        bury([*c10d._world.pg_map, *self._shared.backends, *self._shared.made])

    def destroy(self) -> None:
        """Destroy every process group of this process, in the main thread, after the abort.

        This includes what an interrupted ``init_process_group`` leaves behind: torch counts the groups that it has
        named, and a rank that has counted one more than the others would wait for them forever under another name.
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
        self.messages.counts.clear()
        self._shared.forget()
        self._graphs.begin_anew()
        c10d._unregister_all_process_groups()  # the names of groups that were being made when they were interrupted
        _forget_meshes()

    def release(self) -> None:
        """Close the connections that were cut, since every rank has left its block and no rank writes any more."""
        self._sockets.release()

    def reap(self) -> None:
        """Release every group that nothing else refers to. Call this after the garbage collector has run."""
        reap()


def _lower_debug_level() -> None:
    """Replace torch's debug level ``DETAIL`` by ``INFO``.

    Torch would compare before each collective how many operations every rank has begun in the group, messages
    between two ranks included (``ProcessGroupWrapper.cpp``). The two ranks of a refill exchange some that no other
    rank takes part in.
    """
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        logger.warning(
            "%s=DETAIL is taken for INFO: torch would compare how often all ranks have used a group, "
            "and only some do to fill a rank",
            TORCH_DISTRIBUTED_DEBUG_ENV,
        )
        dist.set_debug_level(dist.DebugLevel.INFO)


def _forget_meshes() -> None:
    """Have torch forget the meshes of DTensors, which its caches give to those of new meshes that are equal.

    An old mesh looks its groups up by their names, and these may belong to other groups by then.
    """
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = import_module("torch.distributed.tensor.debug")
        clear = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is not None:
            clear()


def _nccl_backends() -> list[Any]:
    """Return the NCCL backend of every group, each once."""
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
# (see gloo_wait.py) does not end before the group's timeout, 30 minutes by default. A group is therefore held here
# until nothing else refers to it, and then released in a separate thread.
_buried: list[Any] = []
_REFERENCES = 4  # this list, the one added by bury(), the variable of reap(), and the argument of getrefcount()


def bury(groups: list[Any]) -> None:
    """Hold ``groups`` until :func:`reap` finds no other reference, if necessary past the interpreter's end."""
    held = {id(group) for group in _buried}
    for group in groups:
        if id(group) not in held:
            held.add(id(group))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _buried.append(group)


def reap() -> None:
    """Release every group that nothing else refers to any more. Call this after the garbage collector has run."""
    index = 0
    while index < len(_buried):
        group = _buried[index]
        if sys.getrefcount(group) > _REFERENCES:
            index += 1
            continue
        holder = [_buried.pop(index)]
        del group  # before the thread starts: whichever thread drops the last reference waits for the destructor
        threading.Thread(target=_let_go, args=(holder,), name="checkpointless-reaper", daemon=True).start()


def _let_go(holder: list[Any]) -> None:
    group = holder.pop()
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
    del group  # the destructor runs here, without the GIL


_FUNCTION = "init_process_group"
_WHY = "NeMo and Lightning give it no device"


class EagerInit:
    """Replacement for ``torch.distributed.init_process_group`` that gives it the device of this process.

    NCCL's communicators are then made with the groups, and those of subgroups by splitting the first one
    (``ncclCommSplit``), which exchanges less than a bootstrap for each of the about twenty of a Megatron job. It is
    off unless ``CHECKPOINTLESS_EAGER_INIT=1``: a split is a collective of all ranks of the first communicator, also
    of those that are not in the subgroup.
    """

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        """Replace torch's function if the user asks for it and this build of torch has NCCL (idempotent)."""
        asked = os.environ.get(EAGER_INIT_ENV) == YES and dist.is_nccl_available()
        if asked and not self._patches.are_made:
            self._patches.make([Patch(module, _FUNCTION, _with_device, _WHY) for module in (c10d, dist)])

    def uninstall(self) -> None:
        """Restore torch's function."""
        self._patches.undo()


def _with_device(original: Callable[..., None]) -> Callable[..., None]:
    """Return torch's function, given the current device where it makes groups of NCCL's."""

    @functools.wraps(original)
    def init(backend: str | None = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        of_nccl = backend is None or "nccl" in str(backend).lower()
        if device_id is None and of_nccl and torch.cuda.is_available():
            device_id = torch.device("cuda", torch.cuda.current_device())
        original(backend, *args, device_id=device_id, **options)

    return init


class PointToPointCounts:
    """Counts what this rank has sent to, and wants to receive from, each rank: torch counts collectives only.

    Attributes:
        counts: how often, by group and pair: ``4/0>1`` is from rank 0 of the group that torch calls ``4`` to its
            rank 1. The sender and the receiver count the same.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._patches = Patches()

    def install(self) -> None:
        """Count from now on (idempotent)."""
        if not self._patches.are_made:
            self._patches.make(
                [
                    Patch(dist.ProcessGroup, "send", self.counting_sends, "torch does not count messages"),
                    Patch(dist.ProcessGroup, "recv", self.counting_receipts, "torch does not count messages"),
                ]
            )

    def uninstall(self) -> None:
        """Restore torch's methods."""
        self._patches.undo()

    def counting_sends(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Return a group's ``send``, counted."""

        @functools.wraps(send)
        def counting(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            self._count(group, group.rank(), peer)
            return send(group, tensors, peer, *args, **kwargs)

        return counting

    def counting_receipts(self, recv: Callable[..., Any]) -> Callable[..., Any]:
        """Return a group's ``recv``, counted."""

        @functools.wraps(recv)
        def counting(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            self._count(group, peer, group.rank())
            return recv(group, tensors, peer, *args, **kwargs)

        return counting

    def _count(self, group: Any, source: int, target: int) -> None:
        self.counts[f"{c10d._world.pg_names.get(group)}/{source}>{target}"] += 1


#: torch registers process groups for the whole process, so one object owns them.
process_groups = ProcessGroups()
