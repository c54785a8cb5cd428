"""Iterators that are made before the steps of a loop and give data in several of them.

A fault makes the block begin anew, and such an iterator with it, at its first batch: nothing tells it where the
steps go on. One that is made inside of the loop knows the step. The others are found in the first steps.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import operator
import os
import random
import sys
from collections.abc import Iterator, Mapping
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from typing_extensions import TypeIs

from checkpointless.inprocess import UnrecoverableError

_MADE_BEFORE = (
    "{} was made before the first step and gives data in several steps: after a fault it would begin anew, and "
    "steps would take other batches than without the fault. Make it inside of the loop, at the batch of the step "
    "that comes first there, or take the batches of a step by its number"
)
_OURS = ("checkpointless.recovery.", "checkpointless.inprocess.")
_LIBRARIES = ("torch", "megatron", "checkpointless", "builtins", "transformer_engine")  # keep no user's iterators
_DEEPEST = 4  # iterators within iterators
_FRAMES = 20
_FOLDER = os.path.dirname(__file__)
_LOOKS = (
    3  # at the beginnings of steps: what is there before the first, what has moved from the second to the third
)


class LastingIterators:
    """The iterators that were there before the first step of an entry of the block."""

    def __init__(self) -> None:
        self._looks = 0
        self._found: dict[str, Iterator[Any]] = {}
        self._places: dict[str, object] = {}
        self._begun: WeakKeyDictionary[object, int] = (
            WeakKeyDictionary()
        )  # by loader's iterator: 0, or its first step

    def begin_pass(self, loader_iterator: object) -> None:
        """Note that a loader's iterator begins inside of the loop, at whatever batch that knows the step."""
        self._begun[loader_iterator] = 0

    def give(self, loader_iterator: object, step: int) -> None:
        """Note that a loader's iterator gives a batch in ``step``.

        Raises:
            UnrecoverableError: it has begun before the loop, and has given one in another step.
        """
        first = self._begun.setdefault(loader_iterator, step)
        if first not in (0, step):
            raise UnrecoverableError(_MADE_BEFORE.format("an iterator of a DataLoader"))

    def look(self, frame: FrameType | None) -> None:
        """Look at what the code of a loop refers to when a step begins.

        Args:
            frame: the frame that asks for the step, or one inside of it.

        Raises:
            UnrecoverableError: an iterator that was there before the first step moves from step to step.
        """
        self._looks += 1
        if self._looks == 1:
            self._found = {name: each for name, each in _iterators_of(frame) if not _follows_steps(each)}
        elif self._looks < _LOOKS:
            self._places = {name: _place_of(each) for name, each in self._found.items()}
        elif self._looks == _LOOKS:
            found, self._found = self._found, {}
            for name, each in found.items():
                if _place_of(each) != self._places[name]:
                    raise UnrecoverableError(_MADE_BEFORE.format(f"the iterator {name}"))


def _iterators_of(frame: FrameType | None) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield what the code that runs a loop refers to by its variables and by the attributes of its objects."""
    for variables in variables_of_loop(frame):
        yield from _iterators_in(variables)


def variables_of_loop(frame: FrameType | None) -> Iterator[Mapping[str, object]]:
    """Yield the variables of the code that runs a loop: those of its functions, and the global ones of its modules.

    Args:
        frame: the frame that asks for a step, or one inside of it.
    """
    modules: set[str] = set()
    for each in _frames_of_loop(frame):
        variables = each.f_locals
        yield dict(variables)
        if each.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(variables, dict):
            variables.clear()  # Python 3.12 and older keep this copy, and what it refers to, until the frame ends
        if (name := each.f_globals.get("__name__", "")) not in modules:
            modules.add(name)
            yield each.f_globals


def _frames_of_loop(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames between our generator of steps and our wrapper."""
    is_user, count = False, 0
    while frame is not None and count < _FRAMES:
        is_ours = str(frame.f_globals.get("__name__", "")).startswith(_OURS)
        if is_ours and is_user:
            return
        if not is_ours:
            is_user = True
            count += 1
            yield frame
        frame = frame.f_back


def _iterators_in(variables: Mapping[str, object]) -> Iterator[tuple[str, Iterator[Any]]]:
    for name, value in list(variables.items()):
        if _is_iterator(value):
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}[{key!r}]", each) for key, each in list(value.items()) if _is_iterator(each))
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{at}]", each) for at, each in enumerate(value) if _is_iterator(each))
        elif is_of_user(value):
            attributes = list(vars(value).items())
            yield from ((f"{name}.{key}", each) for key, each in attributes if _is_iterator(each))


def _is_iterator(value: object) -> TypeIs[Iterator[Any]]:
    return hasattr(type(value), "__next__")


def is_of_user(value: object) -> bool:
    """Return whether a value is an object with attributes of its own, of none of the libraries' classes."""
    if isinstance(value, ModuleType | FunctionType | type) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _referred(iterator: Iterator[Any]) -> Iterator[object]:
    """Yield what an iterator refers to: its attributes; of a generator its variables and what it loops over."""
    own = getattr(iterator, "__dict__", None)
    for each in gc.get_referents(iterator):
        if own is not None and each is own:
            yield from list(own.values())
        elif isinstance(each, tuple):  # zip and map
            yield from each
        elif isinstance(each, CellType):  # a variable of the function that has made a generator
            with contextlib.suppress(ValueError):  # it is empty
                yield each.cell_contents
        else:
            yield each


def _follows_steps(iterator: Iterator[Any], depth: int = 0) -> bool:
    """Return whether an iterator is our generator of steps, or goes through it."""
    if isinstance(iterator, GeneratorType) and _is_ours_or_running(iterator):
        return True
    return depth < _DEEPEST and any(
        _follows_steps(each, depth + 1) for each in _referred(iterator) if _is_iterator(each)
    )


def _is_ours_or_running(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Return whether a generator yields our steps, or runs now: then it asks for one."""
    return generator.gi_running or generator.gi_code.co_filename.startswith(_FOLDER)


def _place_of(value: object, depth: int = 0) -> object:
    """Return what changes if an iterator moves, as far as that can be seen from outside; None if nothing can."""
    if isinstance(value, int | str):
        return value
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, random.Random):
        return value.getstate()
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if not _is_iterator(value) or depth >= _DEEPEST:
        return None
    left = operator.length_hint(value) if type(value).__module__ == "builtins" else 0
    places = (_place_of(each, depth + 1) for each in _referred(value))
    return (left, *(place for place in places if place is not None))
