"""Declared state of a loop of one's own: what ``state={...}`` names, and a look for what it does not name."""

from __future__ import annotations

import inspect
import io
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Set
from types import FrameType
from typing import Any

import numpy as np
import torch

from checkpointless.state.rank_local.declared import has_state, put_object, put_value, take_object
from checkpointless.state.serialization.digest import digest_value, samples

_CONTAINERS = (list, dict, set, deque, torch.Tensor, np.ndarray)
_NUMBERS = (bool, int, float, complex, str, bytes)
_LOOKS = 3  # at beginnings of steps: what is there before the first, what has changed from the second to the third
_LARGE = 1024  # elements of a tensor from which a look takes samples
_DEEPEST = 8  # containers within containers
_UNDECLARED = (
    "these variables of the loop change from step to step and begin anew after a fault: %s. Where a later step "
    "uses one, declare it: state={%r: %s} (docs/contract.md, 3)"
)
_ITERATOR = (
    "the iterator %s was made before the first step: after a fault it begins anew, and steps take other batches "
    "than without the fault. Make it in the loop, at the batch of the step that comes first there "
    "(docs/contract.md, 5)"
)
_NO_STATE = (
    "state[{!r}] is a {}: give an object with state_dict() and load_state_dict(), a list, dict, set, deque, "
    "tensor or array, a generator of random numbers, or Value(number)"
)
_DRAWN_BETWEEN = (
    "the loop draws random numbers between update() of step %d and the next step: a fault that finds a rank in "
    "update() or behind it leaves them out. Do it at the beginning of a step, which is made again after a fault"
)
_CHANGED_BETWEEN = (
    "declared state changes between update() of step %d and the next step: a fault that finds a rank in update() "
    "or after it leaves this out. Change it in a step, before its update() (docs/contract.md, 3)"
)
_warned: set[str] = set()  # once in a process
logger = logging.getLogger(__name__)


class Value:
    """A number or another plain value that a loop changes, as declared state::

        average = Value(0.0)
        training = PlainTraining(..., state={"average": average})
        for step in training.steps(1000):
            ...
            average.value = 0.9 * average.value + 0.1 * loss.item()

    Args:
        value: the first value.

    Attributes:
        value: the value now.
    """

    def __init__(self, value: object = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return the value, as a state."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the value to that of a state."""
        self.value = state["value"]


class LoopState:
    """The declared state of one loop.

    Raises:
        ValueError: an object has no state.
    """

    name = "state"

    def __init__(self, state: Mapping[str, Any]) -> None:
        for name, each in state.items():
            if not (has_state(each) or isinstance(each, _CONTAINERS)):
                raise ValueError(_NO_STATE.format(name, type(each).__name__))
        self._state = dict(state)

    def names(self) -> list[str]:
        """Return the names of what is declared."""
        return list(self._state)

    def has(self, value: object) -> bool:
        """Return whether ``value`` is declared."""
        return any(value is each for each in self._state.values())

    def values(self) -> Mapping[str, Any]:
        """Return what is declared, as plain data by name."""
        return {name: take_object(each) for name, each in self._state.items()}

    def put(self, values: Mapping[str, Any]) -> None:
        """Put back what :meth:`values` returned, in place."""
        for name, value in values.items():
            if name in self._state:
                _put(name, self._state[name], value)


class Undeclared:
    """Looks at the variables of the function that iterates over the steps, for what changes and is not declared."""

    def __init__(self, declared: LoopState, known: Iterable[object]) -> None:
        self._declared = declared
        self._known = {id(each) for each in known}
        self._looks = 0
        self._found: set[str] = set()
        self._seen: dict[str, str] = {}

    def look(self, frame: FrameType | None) -> None:
        """Look when a step begins, at a frame; in the third, warn once of what was there before the first and has
        changed.
        """
        self._looks += 1
        if frame is None or self._looks > _LOOKS:
            return
        variables = _variables_of(frame)
        if self._looks == 1:
            self._found = {name for name, value in variables.items() if self._is_candidate(value)}
            for name, value in variables.items():
                if hasattr(type(value), "__next__") and not has_state(value) and not _is_written_to(value):
                    self._warn(name, _ITERATOR, name)
            return
        now = {name: _digest(variables[name], self._known) for name in self._found if name in variables}
        if self._looks == _LOOKS:
            changed = sorted(name for name, digest in now.items() if self._seen.get(name, digest) != digest)
            if changed:
                first = changed[0]
                is_held = isinstance(variables[first], _CONTAINERS) or has_state(variables[first])
                how = first if is_held and type(variables[first]) is not tuple else f"Value({first})"
                self._warn(first, _UNDECLARED, ", ".join(changed), first, how)
        self._seen = now

    def warn_of_changes(self, step: int, has_drawn: bool, has_changed: bool) -> None:
        """Warn, once each, of what the loop does between the update of ``step`` and the next step."""
        for happened, warning in ((has_drawn, _DRAWN_BETWEEN), (has_changed, _CHANGED_BETWEEN)):
            if happened:
                self._warn(warning, warning, step)

    def _warn(self, name: str, message: str, *values: object) -> None:
        if name not in _warned:
            _warned.add(name)
            logger.warning(message, *values)

    def _is_candidate(self, value: object) -> bool:
        if value is None:
            return True
        if id(value) in self._known or self._declared.has(value):
            return False
        if isinstance(value, torch.nn.Module):
            return not any(id(each) in self._known for each in value.parameters())
        return has_state(value) or isinstance(value, (*_NUMBERS, *_CONTAINERS, tuple, np.generic))


def _variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function; of a generator that iterates for it (tqdm), its caller's."""
    if frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
        frame = frame.f_back
    variables = frame.f_locals
    found = dict(variables)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(variables, dict):
        variables.clear()  # Python 3.12 and older keep this copy, and what it refers to, until the frame ends
    return found


def _is_written_to(value: object) -> bool:
    """Return whether a value is an open file that takes lines, such as a log, although files are iterators."""
    return isinstance(value, io.IOBase) and not value.closed and value.writable()


# --- how state is put back, and looked at -------------------------------------------------------------------------


def _put(name: str, present: Any, value: Any) -> None:
    if has_state(present):
        put_object(present, value)
    elif put_value(present, value) is not present:
        raise ValueError(
            f"state[{name!r}] was a {type(value).__name__} before the fault and is a {type(present).__name__} now: "
            "declare the same at every entry of the block"
        )


def _digest(value: Any, known: Set[int] = frozenset()) -> str:
    return digest_value(_shortened(take_object(value), known, 0))


def _shortened(value: Any, known: Set[int], depth: int) -> Any:
    """Return the plain data in ``value``, without what is known, and with samples in the place of large tensors."""
    if id(value) in known or depth > _DEEPEST:
        return None
    if isinstance(value, torch.Tensor):
        return value if value.numel() <= _LARGE else samples({0: value}).get(0, b"")
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)) and len(value) > _LARGE:  # data, or a history
        ends = [value[0], value[-1]] if isinstance(value, (list, tuple, deque)) else []
        return [len(value), *(_shortened(each, known, depth + 1) for each in ends)]
    if isinstance(value, dict):
        return {key: _shortened(each, known, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_shortened(each, known, depth + 1) for each in value]
    if isinstance(value, np.ndarray) and value.size > _LARGE:
        return [value.shape, value.ravel()[:: value.size // _LARGE].copy()]
    return value if isinstance(value, (*_NUMBERS, type(None), np.ndarray, np.generic)) else None
