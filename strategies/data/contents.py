"""What samplers keep in lists, dictionaries and arrays, too much to be kept in every step: whether orders need it.

A sampler that shuffles its list in place gives an order in the second pass that follows from the first one's. A new
sampler has the list of the beginning. Where such contents have changed between the beginnings of two passes, the
earlier pass is begun once more, with them as they are: if it gives other items, it could not be drawn again after a
fault either.
"""

from __future__ import annotations

import copy
import itertools
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.rng import RngStates
from checkpointless.strategies.data.sampler_state import attributes, is_of_a_library, is_plain

_PASSES = 3  # so many are looked at
_COMPARED = 2  # items at the beginning of a pass
_LOOKED_AT = 1000  # values of a long container
_MOST_NUMBERS = 2**22  # of a tensor or an array
_DEEP = 4  # containers within containers
_SCALARS = (int, float, bool, str, bytes, type(None))
_OTHER = (
    "{} keeps in {} what the order of its next pass comes from, which a new one does not have after a fault: make "
    "the order anew in each __iter__, from a copy, or give the loader state_dict and load_state_dict"
)


class Contents:
    """The contents of the containers that samplers, or iterable datasets, keep.

    Args:
        owners: the samplers; those of a library's class are not looked at.
        begin: begins a pass.
    """

    def __init__(self, owners: Iterable[object], begin: Callable[[], Iterator[Any]]) -> None:
        self._owners = [each for each in owners if not is_of_a_library(each)]
        self._begin = begin
        self._left = _PASSES if self._owners else 0
        self._before: tuple[RngStates, dict[tuple[int, str], object], list[Any]] | None = None

    def begins(self, start: RngStates) -> None:
        """Look at the contents, right before a pass begins.

        Args:
            start: all random streams as they are.

        Raises:
            UnrecoverableError: the pass before this one would give other items now.
        """
        if not self._left:
            return
        self._left -= 1
        now = {place: found for place, found in self._seen()}
        if self._before is not None:
            started, before, items = self._before
            changed = [place for place, found in now.items() if before.get(place, found) != found]
            if changed and items and self._again(started, start, changed, len(items)) != items:
                owner, name = changed[0]
                raise UnrecoverableError(_OTHER.format(type(self._owners[owner]).__name__, name))
        self._before = (start, now, [])

    def noted(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of the pass that has begun, and note the first ones."""
        before = self._before
        if not self._left or before is None:
            yield from items
            return
        for item in items:
            if len(before[2]) < _COMPARED:
                before[2].append(repr(item))
            yield item

    def _again(self, started: RngStates, now: RngStates, changed: list[tuple[int, str]], count: int) -> list[str]:
        """Return the first items that a pass gives which begins with earlier streams; nothing stays changed."""
        kept = {place: getattr(self._owners[place[0]], place[1]) for place in changed}
        contents = copy.deepcopy(kept)
        started.restore()
        try:
            return list(map(repr, itertools.islice(self._begin(), count)))
        finally:
            for place, value in kept.items():
                _put(value, contents[place])
                setattr(self._owners[place[0]], place[1], value)
            now.restore()

    def _seen(self) -> Iterator[tuple[tuple[int, str], object]]:
        for number, owner in enumerate(self._owners):
            for name, value in attributes(owner):
                if not is_plain(value):
                    seen = _digest(value, _DEEP)
                    if seen is not None:
                        yield (number, name), seen


def _digest(value: Any, deep: int) -> object:
    """Return a value that is almost certainly another one if the contents are; None: it is no container."""
    if type(value) in _SCALARS:
        return type(value), value
    if isinstance(value, torch.Tensor) and not value.is_meta:
        flat = value.detach().reshape(-1)[:: max(1, value.numel() // _MOST_NUMBERS)]
        return value.shape, zlib.crc32(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        numbers = value.reshape(-1)[:: max(1, value.size // _MOST_NUMBERS)]
        return value.shape, zlib.crc32(numbers.tobytes()) if value.dtype != object else None
    if deep and type(value) in (list, tuple, deque):
        each = range(0, len(value), max(1, len(value) // _LOOKED_AT))
        return len(value), tuple(_digest(value[place], deep - 1) for place in each)
    if deep and isinstance(value, dict):
        every = max(1, len(value) // _LOOKED_AT)
        return len(value), tuple(
            (repr(key) if type(key) in _SCALARS else None, _digest(part, deep - 1))
            for key, part in itertools.islice(value.items(), 0, None, every)
        )
    if type(value) in (set, frozenset):
        return len(value), frozenset(each for each in value if type(each) in _SCALARS)
    return None


def _put(value: Any, contents: Any) -> None:
    """Put contents back into a container."""
    if isinstance(value, torch.Tensor):
        value.data.copy_(contents)
    elif isinstance(value, list):
        value[:] = contents
    elif isinstance(value, dict | set):
        value.clear()
        value.update(contents)
    elif isinstance(value, deque):
        value.clear()
        value.extend(contents)
    elif hasattr(value, "dtype"):
        value[...] = contents
