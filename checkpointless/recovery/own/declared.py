"""Plain data of a rank beside its tensors: declared state of a loop, and plain attributes of a trainer's parts.

It is rank-local state: captured at every step boundary with the random streams, kept where they are kept, and
restored with them, on a rank that lived through the fault and on one that was replaced. What has not changed since
the last capture is the same bytes object, so that it is neither encoded nor copied again.
"""

from __future__ import annotations

import logging
import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from checkpointless.environment import RANK_STATE_BYTES_ENV, own_rank
from checkpointless.serialization import state_tree

logger = logging.getLogger(__name__)

#: How many bytes of declared state and plain attributes a rank keeps at each step boundary.
DEFAULT_BYTES = 1024 * 1024
_PREFIX = "plain:"
_named: set[str] = set()  # once in a process
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_LEFT_OUT = (
    "after a fault these begin anew, because they are no plain data or larger than the limit of %d bytes: %s "
    "(docs/contract.md, 2)"
)


class Owner(Protocol):
    """Something with plain data, such as a callback.

    Attributes:
        name: its name, the same at every entry of the block.
    """

    name: str

    def values(self) -> Mapping[str, Any]:
        """Return what it has now, by name: plain data and other objects."""

    def put(self, values: Mapping[str, Any]) -> None:
        """Put back plain data that :meth:`values` returned before."""


class _Taken:
    """One value as it was captured last.

    Attributes:
        encoded: the value as bytes; None: it is no plain data.
    """

    __slots__ = ("_seen", "encoded")

    def __init__(self, value: Any, before: _Taken | None) -> None:
        self._seen = _look(value)
        self.encoded: bytes | None = _encoded(value)
        if before is not None and before.encoded == self.encoded:
            self.encoded = before.encoded

    def is_of(self, value: Any) -> bool:
        """Return whether ``value`` is certainly what was captured."""
        now = _look(value)
        seen = self._seen
        return now is not None and seen is not None and len(now) == len(seen) and all(map(operator.is_, now, seen))


class DeclaredState:
    """The plain data of all owners of a training.

    Args:
        owners: returns the owners, in an order of their own.
        limit: how many bytes are kept, the smallest values first. Default: ``CHECKPOINTLESS_RANK_STATE_BYTES``, or
            1 MiB.
    """

    def __init__(self, owners: Callable[[], Iterable[Owner]], limit: int | None = None) -> None:
        self._owners = owners
        self._limit = limit if limit is not None else _limit()
        self._taken: dict[str, _Taken] = {}
        self._streams: dict[str, bytes] = {}

    @property
    def kept(self) -> Mapping[str, bytes]:
        """What :meth:`take` returned last."""
        return self._streams

    def take(self) -> dict[str, bytes]:
        """Capture everything; the same dictionary is returned as long as nothing has changed."""
        taken: dict[str, _Taken] = {}
        for owner in self._owners():
            for name, value in owner.values().items():
                key = f"{owner.name}.{name}"
                before = self._taken.get(key)
                taken[key] = before if before is not None and before.is_of(value) else _Taken(value, before)
        self._taken = taken
        streams, left_out, room = {}, [], self._limit
        for key, each in sorted(taken.items(), key=lambda item: len(item[1].encoded or b"")):
            size = len(each.encoded) if each.encoded is not None else self._limit + 1
            if each.encoded is None or size > room:
                left_out.append(key)
                continue
            room -= size
            streams[_PREFIX + key] = each.encoded
        self._name(left_out)
        if streams.keys() != self._streams.keys() or any(
            each is not self._streams[key] for key, each in streams.items()
        ):
            self._streams = streams
        return self._streams

    def put(self, streams: Mapping[str, bytes]) -> None:
        """Put back what :meth:`take` returned, as far as there are owners of it."""
        for owner in self._owners():
            prefix = f"{_PREFIX}{owner.name}."
            values = {
                key[len(prefix) :]: state_tree.loads(encoded)
                for key, encoded in streams.items()
                if key.startswith(prefix)
            }
            if values:
                owner.put(values)
        self._taken = {}

    def _name(self, left_out: Iterable[str]) -> None:
        fresh = sorted(set(left_out) - _named)
        _named.update(fresh)
        if fresh and own_rank() == 0:
            logger.warning(_LEFT_OUT, self._limit, ", ".join(fresh))


def put_value(present: object, value: object) -> object:
    """Return ``value``, in the container ``present`` if that has its type: others may refer to it, too."""
    if type(present) is not type(value):
        return value
    if isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif (isinstance(present, dict) and isinstance(value, dict)) or (
        isinstance(present, set) and isinstance(value, set)
    ):
        present.clear()
        present.update(value)
    elif isinstance(present, deque) and isinstance(value, deque):
        present.clear()
        present.extend(value)
    elif isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        if (present.shape, present.dtype) != (value.shape, value.dtype):
            return value
        with torch.no_grad():
            present.copy_(value)
    else:
        return value
    return present


def _look(value: Any) -> list[Any] | None:
    """Return objects that are the same as long as ``value`` has not changed; None: that cannot be seen so."""
    if type(value) in _CONSTANTS:
        return [value]
    if type(value) in (list, tuple):
        items = list(value)
    elif type(value) is dict:
        items = [*value.keys(), *value.values()]
    else:
        return None
    return [value, *items] if all(map(_CONSTANTS.__contains__, map(type, items))) else None


def _encoded(value: Any) -> bytes | None:
    try:
        return state_tree.dumps(value)
    except state_tree.StateTreeError:
        return None


def _limit() -> int:
    given = os.environ.get(RANK_STATE_BYTES_ENV, "")
    return int(given) if given.isdecimal() else DEFAULT_BYTES


_declared: DeclaredState | None = None


def begin_declared(state: DeclaredState | None) -> None:
    """Have ``state`` captured and restored with the random streams from now on; None: nothing is."""
    global _declared
    _declared = state


def take_declared() -> dict[str, bytes]:
    """Capture what the training under way has declared, by names that no random stream has."""
    return _declared.take() if _declared is not None else {}


def put_declared(streams: Mapping[str, bytes]) -> None:
    """Put back what :func:`take_declared` returned; other streams in the mapping are left out."""
    if _declared is not None:
        _declared.put(streams)


def keeps_declared(key: str) -> bool:
    """Return whether a value, by the name of its owner and its own, was kept at the last capture."""
    return _declared is not None and _PREFIX + key in _declared.kept


def is_declared(name: str) -> bool:
    """Return whether a stream of that name is declared state."""
    return name.startswith(_PREFIX)
