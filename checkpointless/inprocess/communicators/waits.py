"""Make a thread that waits for gloo or for a store interruptible.

When a connection breaks, gloo fails the operations that wait for the peer, but forgets a send that is in its
transmit queue and does not notify its waiter (``Pair::signalException`` in gloo's TCP transport). The wait then
lasts until the group's timeout, 30 minutes by default. ``Work.wait`` is therefore made to wait in short turns,
between which an asynchronous exception is delivered.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.system.environment import TORCH_GLOO_LAZY_INIT_ENV, TORCH_YES
from checkpointless.system.patches import Patch

logger = logging.getLogger(__name__)

# `torch.distributed.rendezvous` is also the name of a function, which hides the module as an attribute.
_rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # Any: a module, private parts included

_TURN = timedelta(milliseconds=50)


class _Waited:
    """For how many seconds the main thread of this process has waited for others in Python, over gloo."""

    seconds = 0.0


waited = _Waited()
_TIMED_OUT = "Operation timed out"
# The c10d::OpType of each work whose wait can be split into turns. Of the others, a send or receive fails if its
# wait times out, and gloo's reduce-scatter (which has no separate type) waits until it completes, whatever the
# timeout.
_IN_TURNS = frozenset({0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 15})
_CONNECT_TIMEOUT_S = 1.0
_ATTEMPT = timedelta(seconds=20)


def _interruptible_wait(original: Callable[..., Any]) -> Callable[..., bool]:
    """Return ``Work.wait`` in short turns for gloo in the main thread; NCCL's only orders streams, and stays."""

    def wait(work: Any, timeout: timedelta = timedelta(0)) -> bool:
        if timeout > timedelta(0):
            return bool(original(work, timeout))
        if threading.current_thread() is not threading.main_thread():
            return bool(original(work))  # no other thread is interrupted
        if torch.cuda.is_initialized() and _is_of_nccl(work):
            return bool(original(work))
        began_s = time.perf_counter()
        try:
            if work._get_op_type() in _IN_TURNS:
                return _wait_in_turns(original, work)
            return run_in_helper_thread(lambda: bool(original(work)))
        finally:
            waited.seconds += time.perf_counter() - began_s

    return wait


def patches() -> list[Patch]:
    """Return what makes waits of this process interruptible."""
    table = [
        Patch(c10d.Work, "wait", _interruptible_wait, "no interruption reaches it"),
        Patch(_rendezvous, "_create_c10d_store", _interruptible_store, "it makes every client of a store"),
    ]
    if dist.is_gloo_available():
        table.append(Patch(c10d, "ProcessGroupGloo", _InterruptibleGloo, "it connects in C++"))
    return table


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


class _InterruptibleGloo:
    """Stands for ``ProcessGroupGloo`` where torch makes groups, in a helper thread.

    Of each two ranks one waits in C++ until the other connects (``connectAsListener``); if that is lost before,
    there is nothing to cut, and the wait lasts five times the group's timeout, 30 minutes by default. All ranks are
    connected at once: with ``TORCH_GLOO_LAZY_INIT`` connections would come unknown, and collectives in flight at a
    fault would write to kept parameters.
    """

    def __init__(self, original: Any) -> None:  # Any: a class of C++
        self._original = original

    def __call__(self, *args: object, **kwargs: object) -> Any:  # Any: an instance of the class of C++
        _connect_at_once()
        if threading.current_thread() is not threading.main_thread():
            return self._original(*args, **kwargs)  # no other thread is interrupted
        return run_in_helper_thread(lambda: self._original(*args, **kwargs))

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
            "%s=%s is ignored: connections that gloo makes within a step cannot be cut at a fault",
            TORCH_GLOO_LAZY_INIT_ENV,
            asked,
        )
        os.environ[TORCH_GLOO_LAZY_INIT_ENV] = "0"


def _interruptible_store(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's factory of stores, which first waits in Python until the store listens (torch's: minutes)."""

    @functools.wraps(original)
    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any) -> Any:
        if rank == 0 and not _rendezvous._torchelastic_use_agent_store():
            return original(hostname, port, rank, world_size, timeout, *more)  # this rank hosts the store
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            _wait_until_listening(hostname, port, deadline)
            try:
                store = run_in_helper_thread(lambda: original(hostname, port, rank, world_size, _ATTEMPT, *more))
            except dist.DistError:
                if time.monotonic() >= deadline:
                    raise
                continue
            store.set_timeout(timeout)
            return store

    return create


def _wait_until_listening(hostname: str, port: int, deadline: float) -> None:
    """Return when a server listens at the address, or at the deadline, so that torch reports the error."""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((hostname, port), timeout=_CONNECT_TIMEOUT_S).close()
            return
        except OSError:
            time.sleep(_TURN.total_seconds())
