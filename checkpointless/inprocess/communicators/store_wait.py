"""Wait for a store in Python before torch does so in C++, where no interruption is handled before the timeout.

A store that closes while a fault is handled is not waited for, whereas torch's own client would keep connecting to
it for minutes.
"""

from __future__ import annotations

import functools
import importlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from checkpointless.inprocess.communicators.helper_thread import HelperThread
from checkpointless.patches import Patch, Patches

# `torch.distributed.rendezvous` is also the name of a function, which hides the module as an attribute.
rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # Any: a module, private parts included

_FACTORY = (
    "_create_c10d_store"  # every client and server of an env:// or tcp:// rendezvous is made by this function
)
_TURN_S = 0.05
_CONNECT_TIMEOUT_S = 1.0
_ATTEMPT = timedelta(seconds=20)


class InterruptibleStore:
    """Replacement for torch's store factory while a block runs."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        """Replace torch's function (idempotent)."""
        if not self._patches.are_made:
            self._patches.make([Patch(rendezvous, _FACTORY, _interruptible, "no interruption reaches it")])

    def uninstall(self) -> None:
        """Restore torch's function."""
        self._patches.undo()


def _interruptible(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's factory of stores, which first waits in Python until the store listens."""

    @functools.wraps(original)
    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *more: Any) -> Any:
        if rank == 0 and not rendezvous._torchelastic_use_agent_store():
            return original(hostname, port, rank, world_size, timeout, *more)  # this rank hosts the store
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            _wait_until_listening(hostname, port, deadline)
            try:
                store = _connect(lambda: original(hostname, port, rank, world_size, _ATTEMPT, *more))
            except dist.DistError:
                if time.monotonic() >= deadline:
                    raise
                continue
            store.set_timeout(timeout)
            return store

    return create


def _connect(create: Callable[[], Any]) -> Any:
    """Create the client in a helper thread: if the store closes meanwhile, torch blocks until its timeout."""
    helper = HelperThread()
    try:
        return helper.run(create)
    finally:
        helper.end()


def _wait_until_listening(hostname: str, port: int, deadline: float) -> None:
    """Return when a server listens at the address, or at the deadline, so that torch reports the error."""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((hostname, port), timeout=_CONNECT_TIMEOUT_S).close()
            return
        except OSError:
            time.sleep(_TURN_S)
