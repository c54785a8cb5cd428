"""Plain data of a rank apart from its tensors: declared state of a loop, and plain attributes of a trainer's parts.

It is captured at every step boundary with the random streams, kept where they are kept, and restored with them.
What has not changed since the last capture is the same bytes object, neither encoded nor copied again.
"""

from __future__ import annotations

import enum
import itertools
import json
import logging
import operator
import os
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import digest_value
from checkpointless.state.serialization.state_tree import is_named_tuple
from checkpointless.system.environment import RANK_STATE_BYTES_ENV, own_rank

logger = logging.getLogger(__name__)

#: How many bytes of declared state and plain attributes a rank keeps at each step boundary.
DEFAULT_BYTES = 1024 * 1024
_MOST_BYTES = 7 * 256 * 1024  # a slot of the board has room for random streams and buffers, too
_PREFIX = "plain:"
ATTRIBUTES = "vars()"  # the name of the list of an owner's attributes
_named: set[str] = set()  # once in a process
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMBERS = frozenset({type(None), bool, int, float})
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_TREE, _FLOATS, _CLASSES = b"t", b"f", b"c"  # the first byte says how the rest is encoded
_LEFT_OUT = (
    "after a fault these begin anew, because they are no plain data or larger than the limit of %d bytes: %s "
    "(docs/contract.md, 2)"
)

_NOT_KEPT = (
    "declared state cannot be kept: {} is no plain data or larger than the limit of {} bytes. Give a module to "
    "modules=[...], or declare less ({}, docs/contract.md, 3)"
)


class _Owner(Protocol):
    """Something with plain data, such as a callback."""

    name: str

    def values(self) -> Mapping[str, Any]:
        """Return what it has now, by name: plain data and other objects."""

    def put(self, values: Mapping[str, Any]) -> None:
        """Put back plain data that :meth:`values` returned before."""


class _Taken:
    """One value as captured last, ``encoded``; None: no plain data, too large, or parameters (``is_reference``)."""

    __slots__ = ("_left_out", "_seen", "encoded", "is_reference")

    def __init__(self, value: Any, before: _Taken | None, limit: int) -> None:
        self._seen = _look(value, limit)
        self.encoded: bytes | None = None
        self.is_reference = False
        found = _Found(value, limit)
        if not found.is_larger:
            self.is_reference = found.has_parameters
            self.encoded = _encoded(value, found.kinds) if not self.is_reference else None
        # What made it be left out, to be looked at again only if that may have changed.
        has_stayed = self.encoded is None and (found.is_larger or not isinstance(value, _CONTAINERS))
        self._left_out = (value, _lengths(value)) if has_stayed else None
        if before is not None and before.encoded == self.encoded:
            self.encoded = before.encoded

    def is_of(self, value: Any) -> bool:
        """Return whether ``value`` is certainly what was captured, or cannot be captured still."""
        if self._left_out is not None:
            left_out, lengths = self._left_out
            return left_out is value and all(map(operator.ge, _lengths(value), lengths))
        seen = self._seen
        if seen is None or seen[0] is not value:
            return False
        if type(value) in _CONSTANTS:
            return True
        now = [*value, *value.values()] if type(value) is dict else value
        return len(now) == len(seen) - 1 and all(map(operator.is_, now, itertools.islice(seen, 1, None)))


_FEW = 256


def _lengths(value: Any) -> list[int]:
    """Return the length of a container, and of those in it if it has few elements."""
    if not isinstance(value, _CONTAINERS):
        return []
    inner = value.values() if isinstance(value, dict) else value
    nested = [len(each) for each in inner if isinstance(each, _CONTAINERS)] if len(value) <= _FEW else []
    return [len(value), *nested]


class DeclaredState:
    """The plain data of all owners of a training, by names that no random stream has."""

    def __init__(self, owners: Callable[[], Iterable[_Owner]] = tuple, limit: int | None = None) -> None:
        self.begin(owners, limit)

    def begin(self, owners: Callable[[], Iterable[_Owner]] = tuple, limit: int | None = None) -> None:
        """Begin with ``owners``, of whose values the smallest are kept, up to ``limit`` bytes in all."""
        self._owners = owners
        self._limit = limit if limit is not None else _limit()
        self._taken: dict[str, _Taken] = {}
        self._streams: dict[str, bytes] = {}

    def keeps(self, key: str) -> bool:
        """Return whether a value, by the name of its owner and its own, was kept at the last capture."""
        return _PREFIX + key in self._streams

    def take(self) -> dict[str, bytes]:
        """Capture everything; the same dictionary is returned as long as nothing has changed."""
        taken: dict[str, _Taken] = {}
        for owner in self._owners():
            for name, value in owner.values().items():
                key = f"{owner.name}.{name}"
                before = self._taken.get(key)
                is_known = before is not None and before.is_of(value)
                taken[key] = before if is_known and before is not None else _Taken(value, before, self._limit)
        self._taken = taken
        streams, left_out, room = {}, [], self._limit
        for key, each in sorted(taken.items(), key=lambda item: len(item[1].encoded or b"")):
            size = len(each.encoded) if each.encoded is not None else self._limit + 1
            if each.encoded is None or size > room:
                left_out += [] if each.is_reference else [key]
                continue
            room -= size
            streams[_PREFIX + key] = each.encoded
        self._name(left_out)
        if streams.keys() != self._streams.keys() or any(
            each is not self._streams[key] for key, each in streams.items()
        ):
            self._streams = streams
        return self._streams

    def require_all(self) -> None:
        """Raise ``ValueError`` if something cannot be kept: it is no plain data, or larger than the limit."""
        streams = self.take()
        lost = [key for key in self._taken if _PREFIX + key not in streams]
        if lost:
            raise ValueError(_NOT_KEPT.format(", ".join(sorted(lost)), self._limit, RANK_STATE_BYTES_ENV))

    def put(self, streams: Mapping[str, bytes]) -> None:
        """Put back what :meth:`take` returned, as far as there are owners of it; other streams are left out."""
        for owner in self._owners():
            prefix = f"{_PREFIX}{owner.name}."
            values = {
                key[len(prefix) :]: _decoded(encoded) for key, encoded in streams.items() if key.startswith(prefix)
            }
            if values:
                owner.put(values)
        self._taken = {}

    @staticmethod
    def part_of(streams: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return which of ``streams`` are declared state."""
        return {name: each for name, each in streams.items() if name.startswith(_PREFIX)}

    @classmethod
    def digests(cls, streams: Mapping[str, bytes]) -> dict[str, str]:
        """Return digests of what :meth:`take` returned, by name; "" of attributes that it left out."""
        digests: dict[str, str] = {}
        for name, encoded in cls.part_of(streams).items():
            owner, is_list, _ = name.removeprefix(_PREFIX).partition(ATTRIBUTES)
            if is_list:
                digests = {f"{owner}{each}": "" for each in _decoded(encoded)} | digests
            else:
                digests[owner] = digest_value(_decoded(encoded))
        return dict(sorted(digests.items()))

    def _name(self, left_out: Iterable[str]) -> None:
        fresh = sorted(set(left_out) - _named)
        _named.update(fresh)
        if fresh and own_rank() == 0:
            logger.warning(_LEFT_OUT, self._limit, ", ".join(fresh))


def put_value(present: object, value: object) -> object:
    """Return ``value``, in the container ``present`` if that has its type: others may refer to it, too."""
    mine: Any = present
    theirs: Any = value
    if type(mine) is not type(theirs):
        return value
    if isinstance(mine, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, deque) and mine.maxlen == theirs.maxlen:
        mine.clear()
        mine.extend(theirs)
    elif isinstance(mine, torch.Tensor | np.ndarray) and _takes(mine, theirs):
        with torch.no_grad():
            mine[...] = theirs
    else:
        return value
    return present


def _takes(mine: Any, theirs: Any) -> bool:
    """Return whether a tensor or array can be written over (none of torch's inference mode can)."""
    is_writeable = not mine.is_inference() if isinstance(mine, torch.Tensor) else mine.flags.writeable
    return is_writeable and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def has_state(value: object) -> bool:
    """Return whether ``value`` is an object whose state can be taken and put back."""
    if isinstance(value, type):
        return False
    is_stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return is_stateful or is_generator(value)


#: How the state of each kind of generator of random numbers is taken and put back.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (lambda each: each.get_state(), lambda each, state: each.set_state(state)),
    random.Random: (lambda each: each.getstate(), lambda each, state: each.setstate(state)),
    np.random.Generator: (
        lambda each: each.bit_generator.state,
        lambda each, state: setattr(each.bit_generator, "state", state),
    ),
    np.random.RandomState: (lambda each: each.get_state(legacy=False), lambda each, state: each.set_state(state)),
}


def is_generator(value: object) -> bool:
    return isinstance(value, tuple(_GENERATORS))


def take_object(value: object) -> object:
    """Return the state of an object that has one; another value is returned as it is."""
    for kind, (take, _) in _GENERATORS.items():
        if isinstance(value, kind):
            return take(value)
    stateful: Any = value
    return stateful.state_dict() if has_state(value) else value


def put_object(present: object, state: object) -> None:
    """Put back what :func:`take_object` returned of an object with state."""
    stateful: Any = present
    put = next((put for kind, (_, put) in _GENERATORS.items() if isinstance(present, kind)), None)
    if put is not None:
        put(present, state)
    else:
        stateful.load_state_dict(state)


def tensors_in(value: object) -> Iterable[torch.Tensor]:
    return (each for each in _leaves(value) if isinstance(each, torch.Tensor))


def _leaves(value: object) -> Iterable[object]:
    """Yield a value and what is in it, containers, tensors and arrays once each."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (torch.Tensor, np.ndarray, *_CONTAINERS)):
            if id(each) in seen:
                continue
            seen.add(id(each))
        yield each
        if isinstance(each, _CONTAINERS):
            waiting.extend(each)
            waiting.extend(each.values() if isinstance(each, dict) else ())


def _look(value: Any, limit: int) -> list[Any] | None:
    """Return objects that are the same as long as ``value`` has not changed; None: that cannot be seen so."""
    if type(value) in _CONSTANTS:
        return [value]
    if type(value) not in (list, tuple, dict) or len(value) > limit:
        return None
    items = [*value.keys(), *value.values()] if type(value) is dict else list(value)
    return [value, *items] if _CONSTANTS.issuperset(map(type, items)) else None


class _Found:
    """What a look through a value has found; it ends as soon as the value is certainly larger than the limit."""

    def __init__(self, value: Any, limit: int) -> None:
        self.is_larger = self.has_parameters = False
        self.kinds: set[type] = set()
        if _is_of_floats(value):
            self.is_larger = array("d").itemsize * len(value) > limit
            return
        for each in _leaves(value):
            kind = type(each)
            if kind in _NUMBERS:
                limit -= 1
            elif isinstance(each, torch.Tensor):
                limit -= each.numel() * each.element_size()
                self.has_parameters |= isinstance(each, torch.nn.Parameter)
            elif isinstance(each, np.ndarray):
                limit -= each.nbytes
            else:
                limit -= len(each) if isinstance(each, (str, bytes, bytearray, *_CONTAINERS)) else 1
                if isinstance(each, enum.Enum) or is_named_tuple(kind):
                    self.kinds.add(kind)
            if limit < 0:
                self.is_larger = True
                return


# --- values as bytes ----------------------------------------------------------------------------------------------


def _is_of_floats(value: object) -> bool:
    return type(value) is list and set(map(type, value)) == {float}


def _encoded(value: Any, kinds: Iterable[type]) -> bytes | None:
    if _is_of_floats(value):
        return _FLOATS + array("d", value).tobytes()  # a history that grows with every step
    names = sorted((kind.__module__, kind.__qualname__) for kind in kinds)
    for kind in kinds:
        if _class_of(kind.__module__, kind.__qualname__) is not kind:
            return None
        state_tree.register_plain_type(kind)
    try:
        tree = state_tree.dumps(value)
    except state_tree.StateTreeError:
        return None
    return _CLASSES + json.dumps(names).encode() + b"\n" + tree if names else _TREE + tree


def _decoded(encoded: bytes) -> Any:
    how, rest = encoded[:1], encoded[1:]
    if how == _FLOATS:
        values = array("d")
        values.frombytes(rest)
        return values.tolist()
    if how == _CLASSES:
        names, _, rest = rest.partition(b"\n")
        for name in json.loads(names):
            kind = _class_of(*name)
            if kind is not None:
                state_tree.register_plain_type(kind)
    return state_tree.loads(rest)


def _class_of(module: str, name: str) -> type | None:
    """Return an enum or a class of named tuples that a loaded module has; nothing is imported or called."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_fit = isinstance(found, type) and (issubclass(found, enum.Enum) or is_named_tuple(found))
    return found if is_fit else None


def _limit() -> int:
    given = os.environ.get(RANK_STATE_BYTES_ENV, "")
    return min(int(given), _MOST_BYTES) if given.isdecimal() else DEFAULT_BYTES


#: What the training under way has declared, which is captured and restored with its random streams.
declared_state = DeclaredState()
