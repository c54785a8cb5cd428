"""What samplers keep from pass to pass: generators, numbers and other plain values, taken and put back as bytes.

The order of a pass may come from what its sampler keeps for itself: a generator under any name, a count of the
passes. A sampler that is made anew after a fault lacks it. It is kept with the random streams of the rank: as of
the beginning of a pass, from which the pass is drawn again, and as of each moment after a step. An iterable dataset
that is gone through in the training process takes a sampler's place.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import IterableDataset, Sampler

from checkpointless.inprocess import UnrecoverableError
from checkpointless.state.rank_local.declared import put_value
from checkpointless.state.serialization import state_tree

#: Whose samplers are known to keep nothing but ``generator`` between passes, and to draw at a pass's beginning or
#: from a generator of their own.
_LIBRARIES = {
    "builtins",
    "torch",
    "lightning",
    "pytorch_lightning",
    "torchdata",
    "megatron",
    "nemo",
    "checkpointless",
}
_SCALARS = (int, float, bool, str, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST = 4096  # so many values of a container are kept; a text counts with its characters
_FEW = 64  # so many members of a list are looked at for samplers
_MOST_BYTES = 128 * 1024  # of all that is kept together: a slot of the board has 256 KiB, for the streams as well

Generator: TypeAlias = Any  # of torch, Python or NumPy
_MISSING = object()


def is_of_a_library(sampler: object) -> bool:
    """Return whether ``sampler`` is of a class of torch, Lightning, NeMo or the like, and not of the user's."""
    return type(sampler).__module__.partition(".")[0] in _LIBRARIES


def samplers_within(sampler: object) -> list[Any]:
    """Return ``sampler`` and those that it takes its items from, also one that Lightning divides."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is known for known in found):
            continue
        found.append(each)
        if isinstance(each, DistributedSamplerWrapper):
            divided: Any = each.dataset
            waiting.append(divided._sampler)
            continue
        waiting.append(getattr(each, "sampler", None))
        if not is_of_a_library(each):
            for _, value in attributes(each):
                waiting += [one for one in _members(value) if isinstance(one, Sampler | IterableDataset)]
    return found


class SamplerState:
    """What the samplers of one loader keep from pass to pass.

    Args:
        owners: the loader, and the samplers that its order comes from. Of those that are not of a library's class,
            each generator and each plain value in an attribute is kept; of others, ``generator``.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        first, *samplers = owners
        self._owners: list[Any] = [first, *samplers]
        self._whole = [False, *(not is_of_a_library(each) for each in samplers)]
        self._first = [{name for name, _ in self._of(number)} for number in range(len(self._owners))]

    @property
    def has_own(self) -> bool:
        """Whether one of the samplers is of the user's class."""
        return any(self._whole)

    def generators(self) -> list[torch.Generator]:
        """Return torch's generators among what is kept."""
        found = [value for _, value, _ in self._kept() if isinstance(value, torch.Generator)]
        return list({id(each): each for each in found}.values())

    def take(self) -> dict[str, bytes]:
        """Return what is kept, by owner and attribute, each encoded as plain data.

        Of plain values the smallest are kept, if all are too much to be kept with the random streams.

        Raises:
            UnrecoverableError: generators alone are too much.
        """
        keys: dict[int, str] = {}
        states: dict[str, bytes] = {}
        for key, value, kind in self._kept():
            if not kind:
                states[key] = state_tree.dumps(("value", value))
            elif id(value) in keys:
                states[key] = state_tree.dumps(("alias", keys[id(value)]))
            else:
                keys[id(value)] = key
                states[key] = state_tree.dumps((kind, _state_of(value, kind)))
        plain = sorted((len(states[key]), key) for key, _, kind in self._kept() if not kind)
        room = _MOST_BYTES - sum(map(len, states.values())) + sum(size for size, _ in plain)
        if room < 0:
            names = ", ".join(type(each).__name__ for each, whole in zip(self._owners, self._whole) if whole)
            raise UnrecoverableError(
                f"the sampler {names} keeps more than {_MOST_BYTES >> 10} KiB in generators from pass to pass, too "
                "much to be kept in every step: seed one generator with the epoch in __iter__"
            )
        for size, key in plain:
            room -= size
            if room < 0:
                del states[key]
        return states

    def put(self, states: Mapping[str, bytes]) -> None:
        """Put back what :meth:`take` returned, also in another process; an owner of another class is left alone."""
        places = {self._prefix(number): number for number in range(len(self._owners))}
        made: dict[str, Generator] = {}
        for key, encoded in states.items():
            prefix, _, name = key.rpartition("|")
            if prefix not in places:
                continue
            owner = self._owners[places[prefix]]
            kind, state = state_tree.loads(encoded)
            now = getattr(owner, name, _MISSING)
            if kind == "value":
                value = put_value(now, state)
                if value is not now and not (type(now) in _SCALARS and type(now) is type(value) and now == value):
                    setattr(owner, name, value)
                continue
            if kind == "alias":
                made[key] = made[state]
            else:
                made[key] = now if _kind_of(now) == kind else _new(kind, state)
                _set_state(made[key], kind, state)
            if now is not made[key]:
                setattr(owner, name, made[key])
        for key, number in ((key, places[key.rpartition("|")[0]]) for key, _, _ in list(self._kept())):
            name = key.rpartition("|")[2]
            if key not in states and name not in self._first[number]:  # it was made later than what is put back
                getattr(self._owners[number], "__dict__", {}).pop(name, None)

    def _prefix(self, number: int) -> str:
        return f"{number}:{type(self._owners[number]).__qualname__}" if self._whole[number] else f"{number}:"

    def _kept(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the key, the value and the kind of generator ("": a plain value) of what is kept."""
        for number in range(len(self._owners)):
            prefix = self._prefix(number)
            for name, value in self._of(number):
                kind = _kind_of(value)
                if kind or (self._whole[number] and _is_plain(value)):
                    yield f"{prefix}|{name}", value, kind

    def _of(self, number: int) -> list[tuple[str, Any]]:
        owner = self._owners[number]
        if self._whole[number]:
            return attributes(owner)
        generator = getattr(owner, "generator", None)
        return [("generator", generator)] if isinstance(generator, torch.Generator) else []


def attributes(owner: object) -> list[tuple[str, Any]]:
    """Return the names and values of an object's own attributes."""
    kind: Any = type(owner)  # mypy takes the hash of a class for that of its objects
    found = list(getattr(owner, "__dict__", {}).items())
    found += [(name, getattr(owner, name)) for name in _slots(kind) if hasattr(owner, name)]
    return found


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of a class's slots."""
    each = [one.__dict__.get("__slots__", ()) for one in kind.__mro__]
    names = [name for slots in each for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _members(value: object) -> list[Any]:
    if type(value) in (list, tuple) and len(value) <= _FEW:  # type: ignore[arg-type]
        return list(value)  # type: ignore[call-overload]
    return [value]


def _is_plain(value: object) -> bool:
    """Return whether a value is kept as it is: a scalar, some of them in a container, or a small array."""
    if isinstance(value, str):
        return type(value) is str and len(value) <= _MOST
    if _is_array(value):
        return True
    if type(value) in _SCALARS:
        return True
    if not isinstance(value, _CONTAINERS) or type(value) not in _CONTAINERS or len(value) > _MOST:
        return False
    leaves = [*value, *value.values()] if isinstance(value, dict) else value
    size = sum(len(leaf) if isinstance(leaf, str) else 1 for leaf in leaves)
    return size <= _MOST and all(type(leaf) in _SCALARS for leaf in leaves)


def _is_array(value: Any) -> bool:
    """Return whether a value is a small tensor on the CPU, or an array, of numbers."""
    if isinstance(value, torch.Tensor):
        is_plain_tensor = type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad
        return is_plain_tensor and value.layout is torch.strided and value.numel() <= _MOST
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.size <= _MOST and not value.dtype.hasobject


# --- generators ---------------------------------------------------------------------------------------------------


def _kind_of(value: object) -> str:
    """Return which kind of generator ``value`` is; "" if it is none."""
    if type(value) in _SCALARS or type(value) in _CONTAINERS:
        return ""
    if isinstance(value, torch.Generator):
        return "torch"
    if isinstance(value, random.Random):
        return "" if isinstance(value, random.SystemRandom) else "python"
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ""
    if isinstance(value, numpy.random.RandomState):
        return "numpy-legacy"
    return "numpy" if isinstance(value, numpy.random.Generator) else ""


def _state_of(value: Generator, kind: str) -> Any:
    """Return the state of a generator as plain data."""
    if kind == "torch":
        return value.get_state().numpy().tobytes()
    if kind == "python":
        return value.getstate()
    return value.bit_generator.state if kind == "numpy" else value.get_state(legacy=False)


def _set_state(value: Generator, kind: str, state: Any) -> None:
    if kind == "torch":
        value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif kind == "python":
        value.setstate(state)
    elif kind == "numpy":
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _new(kind: str, state: Any) -> Generator:
    """Make a generator that can have ``state``: the sampler makes its own only later."""
    if kind == "torch":
        return torch.Generator()
    if kind == "python":
        return random.Random(0)
    import numpy

    if kind == "numpy-legacy":
        return numpy.random.RandomState()
    return numpy.random.Generator(getattr(numpy.random, state["bit_generator"])())
