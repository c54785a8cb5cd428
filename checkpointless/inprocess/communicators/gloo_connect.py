"""Connect the ranks of a new gloo group in a helper thread, so that the main thread can leave before all are there.

Of each two ranks of a group one connects, and the other waits in C++ until it does (``connectAsListener`` of
gloo's TCP transport). If the first is lost before it has connected, or leaves its block, there is no connection
yet that could be cut, and the wait lasts for five times the group's timeout, which is 30 minutes by default.
The helper thread of a group that was left stays that long; nobody waits for it.

All ranks of a group are connected when it is made. With ``TORCH_GLOO_LAZY_INIT`` gloo would connect two ranks at
their first message. Such a connection is not known, so it would not be cut: collectives that are in flight at a
fault would go on in gloo's threads, and write to parameters that a rank has kept.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.environment import TORCH_GLOO_LAZY_INIT_ENV, TORCH_YES
from checkpointless.inprocess.communicators.helper_thread import SpareHelper
from checkpointless.inprocess.communicators.shared_backends import SharedBackends
from checkpointless.patches import Patch, Patches

logger = logging.getLogger(__name__)

_BACKEND = "ProcessGroupGloo"  # its constructor connects; torch makes every group's backend by this name


class InterruptibleConnect:
    """Replacement for ``ProcessGroupGloo`` where torch makes groups, in the main thread.

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
