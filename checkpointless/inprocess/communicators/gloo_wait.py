"""Make a thread that waits for gloo interruptible: for a collective, and for the ranks of a new group.

When a connection breaks, gloo fails the operations that wait for the peer, but forgets a send that is in its
transmit queue and does not notify its waiter (``Pair::signalException`` in gloo's TCP transport signals only bound
buffers of that queue). The wait then lasts until the group's timeout, 30 minutes by default. ``Work.wait`` is
therefore made to wait in short turns, between which an asynchronous exception is delivered. (The destructor of the
group would wait too: see :mod:`checkpointless.inprocess.communicators.process_groups`.)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.environment import TORCH_GLOO_LAZY_INIT_ENV, TORCH_YES
from checkpointless.inprocess.communicators.helper_thread import SpareHelper
from checkpointless.inprocess.communicators.shared_backends import SharedBackends
from checkpointless.patches import Patch, Patches

logger = logging.getLogger(__name__)

_TURN = timedelta(milliseconds=50)
_TIMED_OUT = "Operation timed out"
_BACKEND = "ProcessGroupGloo"  # its constructor connects; torch makes every group's backend by this name
# The c10d::OpType of each work whose wait can be split into turns. Of the others, a send or receive fails if its
# wait times out, and gloo's reduce-scatter (which has no separate type) waits until it completes, whatever the
# timeout.
_IN_TURNS = frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15})


class InterruptibleWait:
    """Replacement for ``torch.distributed.Work.wait`` where the work is gloo's.

    NCCL's ``wait`` stays as it is: it orders streams and returns, and a wait of it that times out aborts the
    communicator. Both kinds are met in one process: on GPUs, Megatron-core makes gloo's groups for checkpoints.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._helper = SpareHelper()

    @property
    def is_installed(self) -> bool:
        """Whether torch's method is replaced."""
        return self._patches.are_made

    def install(self) -> None:
        """Replace torch's method (idempotent)."""
        if not self.is_installed:
            self._patches.make([Patch(c10d.Work, "wait", self._interruptible, "no interruption reaches it")])

    def uninstall(self) -> None:
        """Restore torch's method."""
        self._patches.undo()
        self._helper.end()

    def _interruptible(self, original: Callable[..., Any]) -> Callable[..., bool]:
        """Return torch's wait, in short turns where it is that of the main thread."""

        def wait(work: Any, timeout: timedelta = timedelta(0)) -> bool:
            if timeout > timedelta(0):
                return bool(original(work, timeout))
            if threading.current_thread() is not threading.main_thread():
                return bool(original(work))  # no other thread is interrupted
            if torch.cuda.is_initialized() and _is_of_nccl(work):
                return bool(original(work))
            if work._get_op_type() in _IN_TURNS:
                return _wait_in_turns(original, work)
            return self._helper.run(_on_the_same_stream(lambda: bool(original(work))))

        return wait


def _on_the_same_stream(wait: Callable[[], bool]) -> Callable[[], bool]:
    """Return ``wait`` for another thread, in which it orders this thread's stream."""
    if not torch.cuda.is_initialized():
        return wait
    stream: Any = torch.cuda.current_stream()

    def wait_there() -> bool:
        with torch.cuda.stream(stream):
            return wait()

    return wait_there


def _is_of_nccl(work: Any) -> bool:
    """Return whether ``work`` is NCCL's, which alone has a future for its result (``Work::getFutureResult``)."""
    try:
        work.get_future_result()
    except RuntimeError:
        return False
    return True


def _wait_in_turns(original: Callable[..., Any], work: Any) -> bool:
    while not work.is_completed():
        try:
            return bool(original(work, _TURN))
        except RuntimeError as error:
            if _TIMED_OUT not in str(error):
                raise
    return bool(original(work))  # it completed between two turns: this returns, or raises the error of the work


class InterruptibleConnect:
    """Replacement for ``ProcessGroupGloo`` where torch makes groups: the main thread leaves them to a helper.

    Of each two ranks of a group one connects, and the other waits in C++ until it does (``connectAsListener`` of
    gloo's TCP transport). If the first is lost before it has connected, or leaves its block, there is no connection
    yet that could be cut, and the wait lasts for five times the group's timeout, which is 30 minutes by default.
    The helper thread of a group that was left stays that long; nobody waits for it.

    All ranks of a group are connected when it is made. With ``TORCH_GLOO_LAZY_INIT`` gloo would connect two ranks
    at their first message. Such a connection is not known, so it would not be cut: collectives that are in flight
    at a fault would go on in gloo's threads, and write to parameters that a rank has kept.

    Args:
        shared: knows the backends that need not be made again.
    """

    def __init__(self, shared: SharedBackends) -> None:
        self._shared = shared
        self._patches = Patches()
        self._helper = SpareHelper()

    def install(self) -> None:
        """Replace torch's class (idempotent)."""
        if not self._patches.are_made and dist.is_gloo_available():
            self._patches.make([Patch(c10d, _BACKEND, self._in_helper, "it connects in C++")])

    def uninstall(self) -> None:
        """Restore torch's class."""
        self._patches.undo()
        self._helper.end()

    def _in_helper(self, original: Any) -> _Backend:
        return _Backend(original, self._helper, self._shared)


class _Backend:
    """Stands for the class of gloo's groups: makes them, and knows them."""

    def __init__(self, original: Any, helper: SpareHelper, shared: SharedBackends) -> None:  # Any: a class of C++
        self._original = original
        self._helper = helper
        self._shared = shared

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._shared.get(lambda: self._connected(*args, **kwargs))

    def _connected(self, *args: object, **kwargs: object) -> Any:
        _connect_at_once()
        if threading.current_thread() is not threading.main_thread():
            return self._original(*args, **kwargs)  # no other thread is interrupted
        return self._helper.run(lambda: self._original(*args, **kwargs))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._original)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._original)

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # of a copy, whose attributes have not been copied yet
            raise AttributeError(name)
        return getattr(self._original, name)


def _connect_at_once() -> None:
    """Have gloo connect all ranks of a group when it is made, as torch does by default."""
    asked = os.environ.get(TORCH_GLOO_LAZY_INIT_ENV, "")
    if asked.lower() in TORCH_YES:
        logger.warning(
            "%s=%s is not used: connections that gloo makes within a step cannot be cut at a fault",
            TORCH_GLOO_LAZY_INIT_ENV,
            asked,
        )
        os.environ[TORCH_GLOO_LAZY_INIT_ENV] = "0"
