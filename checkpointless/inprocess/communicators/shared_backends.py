"""Make gloo's connections once for groups that need no more: those of one group, and groups of the same ranks.

Each backend of gloo connects its ranks with one another, which takes time, threads, and a descriptor per peer.
torch makes a backend for each kind of device of a group, and uses the first for all (``ProcessGroup::setBackend``
in torch's ``ProcessGroup.hpp``): here no other is made. Groups that are made in :meth:`SharedBackends.sharing` have
a backend in common, if their ranks and their timeouts are the same.

A backend numbers its collectives in the order in which a rank issues them, and matches those of the same number.
Groups can therefore share one if all their ranks issue the collectives of all of them in the same order; when these
end does not matter. Whoever makes the groups has to know that they do. NCCL demands it of communicators that have a
device in common, so it is true of groups that are NCCL's on GPUs. It need not be true of a group that a second
thread uses.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.patches import Patch, Patches

_MOST_MADE = 64  # a block that makes and destroys more in turn needs their descriptors
_FACTORY = "_new_process_group_helper"  # every process group, default or not, is made by this one function

_Backend = TypeVar("_Backend")
_Key = tuple[str, tuple[int, ...], timedelta | None]  # which groups share, the ranks of a group, and its timeout


class _Making(threading.local):
    """What a thread is making.

    Attributes:
        is_group: whether it is making a group.
        backend: that group's backend, once it is made.
        key: under which that group shares its backend; None if it does not.
        among: which of the groups that it makes share their backends; None: none do.
    """

    is_group = False
    backend: Any = None  # Any: an object of C++
    key: _Key | None = None
    among: str | None = None


class SharedBackends:
    """Knows the backend that a group needs which is being made, if there is one already.

    Attributes:
        made: the newest groups that were made. C++ may have the last reference to a group that the block has
            destroyed, as DistributedDataParallel's reducer does. The destructor is run with the interpreter's lock
            then, and joins threads that may wait for it (https://github.com/pytorch/pytorch/issues/56297).
    """

    def __init__(self) -> None:
        self.made: deque[Any] = deque(maxlen=_MOST_MADE)
        self._patches = Patches()
        self._shared: dict[_Key, Any] = {}
        self._now = _Making()

    def install(self) -> None:
        """Replace torch's factory of groups (idempotent)."""
        if not self._patches.are_made and dist.is_gloo_available():
            self._patches.make([Patch(c10d, _FACTORY, self._knowing, "it makes a backend for each kind of device")])

    def uninstall(self) -> None:
        """Restore torch's factory of groups."""
        self._patches.undo()

    @contextmanager
    def sharing(self, among: str = "") -> Iterator[None]:
        """Let groups of the same ranks that this thread makes in this context share a backend.

        All ranks make these groups, and issue their collectives in the same order, from one thread.

        Args:
            among: a name; those of another context share if it was given the same one.
        """
        self._now.among = among
        try:
            yield
        finally:
            self._now.among = None

    def _knowing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's factory of groups, which makes known which group it makes."""

        @functools.wraps(original)
        def make(group_size: int, group_rank: int | None, global_ranks_in_group: Any, *more: Any, **kw: Any) -> Any:
            now, ranks = self._now, global_ranks_in_group
            now.key = None
            if now.among is not None and ranks:
                now.key = now.among, tuple(ranks), kw.get("timeout")
            now.is_group, now.backend = True, None
            try:
                made = original(group_size, group_rank, ranks, *more, **kw)
                if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
                    self.made.append(made[0])
                return made
            finally:
                now.is_group, now.backend, now.key = False, None, None

        return make

    @property
    def connects(self) -> bool:
        """Whether the group that this thread is making needs a backend that has to be made."""
        return self._known() is None

    def _known(self) -> Any:
        now = self._now
        if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
            return None  # torch gives each group another backend then, which it uses with each collective
        return now.backend if now.backend is not None or now.key is None else self._shared.get(now.key)

    def get(self, make: Callable[[], _Backend]) -> _Backend:
        """Return the backend of the group that this thread is making.

        Args:
            make: makes a backend, if there is none yet.
        """
        now = self._now
        backend: _Backend | None = self._known()
        if backend is None:
            backend = make()
        if now.is_group:
            now.backend = backend
            if now.key is not None:
                self._shared[now.key] = backend
        return backend

    @property
    def backends(self) -> list[object]:
        """The backends that are shared."""
        return list(self._shared.values())

    def forget(self) -> None:
        """Forget the backends that are shared, whose groups are destroyed, and what was made."""
        self._shared = {}
        self.made.clear()
        now = self._now  # an interruption may have left it
        now.is_group, now.backend, now.key, now.among = False, None, None, None
