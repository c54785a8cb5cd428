"""Copies of state, taken at every step boundary and looked at after a fault: they get their form when asked for."""

from __future__ import annotations

import copy as copy_module
import logging
from collections import ChainMap, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy
import torch

from checkpointless.state.serialization.plain_values import MAX_DEPTH, PLAIN_TYPES

logger = logging.getLogger(__name__)

_State = TypeVar("_State")

#: Types whose values nobody can change.
IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes})
_UNCHANGING = {*IMMUTABLE, frozenset, type, *(each.kind for each in PLAIN_TYPES)}  # nor what is in them


def is_fixed(value: object) -> bool:
    """Return whether nobody can change a plain value in place."""
    return type(value) in IMMUTABLE or (type(value) is tuple and all(map(is_fixed, value)))


class Later(Generic[_State]):
    """State of a point that is over, and what makes plain data of it.

    Args:
        make: makes the plain data, of nothing that changes after the point.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], _State]) -> None:
        self._make: Callable[[], _State] | None = make
        self._made: _State

    def __call__(self) -> _State:
        """Return the plain data, the same object each time."""
        make = self._make
        if make is not None:
            self._made = make()
            self._make = None  # what it was made of is released
        return self._made


def copy_of(value: object) -> Callable[[], Any]:
    """Copy ``value`` as it is now; return what makes the copy."""
    if type(value) in IMMUTABLE:
        return lambda: value
    if type(value) is dict and len(value) == 1:  # NeMo's data modules have a tensor with one number
        ((name, only),) = value.items()
        if isinstance(only, torch.Tensor) and type(name) is str:
            made = copy_of(only)
            return lambda: {name: made()}
    number = _number_in(value) if isinstance(value, torch.Tensor) and not value.requires_grad else None
    if number is not None:
        return lambda: _tensor_of(*number)
    copied = copy(value)
    return lambda: copied


def copies_of(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Copy ``tensors`` as they are now: numbers on the host as Python's numbers, alike ones elsewhere in one call.

    Returns:
        What makes the copies, without gradients.
    """
    taken = [_number_in(each) for each in tensors]
    others = [each for each, number in zip(tensors, taken) if number is None]
    if not others:
        return lambda: [_tensor_of(*number) for number in taken if number is not None]
    copies = _clones(others)

    def make() -> list[torch.Tensor]:
        rest = iter(copies)
        return [next(rest) if number is None else _tensor_of(*number) for number in taken]

    return make


def _number_in(tensor: torch.Tensor) -> tuple[float, torch.dtype] | None:
    """Return the number of a tensor on the host that has one, and its dtype; None: it has to be copied."""
    if type(tensor) is not torch.Tensor or tensor.dim() or not tensor.is_cpu or tensor.dtype not in _NUMBERS:
        return None
    number: float = tensor.item()
    return (number, tensor.dtype) if number == number else None  # a NaN may have bits of its own


def _tensor_of(number: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype, device="cpu")


#: Dtypes of which each value is one of Python's numbers.
_NUMBERS = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.bool})


def _clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    first = tensors[0]
    if len(tensors) > 1 and all(
        type(each) is torch.Tensor
        and not each.dim()
        and each.dtype is first.dtype
        and each.device == first.device
        and not each.requires_grad
        for each in tensors
    ):
        return list(torch.stack(tuple(tensors)).unbind())
    return [each.detach().clone() for each in tensors]


def copy(tree: _State) -> _State:
    """Return a deep copy of ``tree``: new containers, cloned tensors and arrays, shared immutable values.

    An object that is in two places is one object in the copy, too. An object of any other type is copied by
    ``copy.deepcopy``, or kept as it is if it refuses that. Nothing is refused.

    Args:
        tree: any state.
    """
    return _copy(tree, {}, 0)


def _copy(value: Any, made: dict[int, Any], depth: int) -> Any:
    kind = type(value)
    if kind in _UNCHANGING:
        return value
    if id(value) in made:
        return made[id(value)]
    if depth > MAX_DEPTH:
        return _copy_unknown(value, made)
    if kind is list:
        items: list[Any] = []
        made[id(value)] = items
        items.extend([item if type(item) in _UNCHANGING else _copy(item, made, depth + 1) for item in value])
        return items
    if kind in (dict, OrderedDict, defaultdict):
        pairs: Any = defaultdict(value.default_factory) if kind is defaultdict else kind()
        made[id(value)] = pairs
        for key, item in value.items():
            known = key if type(key) in _UNCHANGING else _copy(key, made, depth + 1)
            pairs[known] = item if type(item) in _UNCHANGING else _copy(item, made, depth + 1)
        if kind is OrderedDict:
            vars(pairs).update({name: _copy(item, made, depth + 1) for name, item in vars(value).items()})
        return pairs
    if kind is tuple:
        copies = [_copy(item, made, depth + 1) for item in value]
        unchanged = all(mine is theirs for mine, theirs in zip(copies, value))
        copied: Any = value if unchanged else tuple(copies)
    elif kind is deque:
        copied = deque((_copy(item, made, depth + 1) for item in value), value.maxlen)
    elif kind in (set, bytearray):  # the items of a set do not change
        copied = kind(value)
    elif kind in (torch.Tensor, torch.nn.Parameter):
        clone = value.detach().clone()
        copied = torch.nn.Parameter(clone, value.requires_grad) if kind is torch.nn.Parameter else clone
        copied.requires_grad_(value.requires_grad)
    elif kind is numpy.ndarray and not value.dtype.hasobject:
        copied = value.copy(order="K")
    else:
        return _copy_unknown(value, made)
    made[id(value)] = copied
    return copied


def _copy_unknown(value: Any, made: dict[int, Any]) -> Any:
    attempt: ChainMap[int, Any] = ChainMap({}, made)  # keeps what a failed attempt leaves half made out of made
    try:
        copied = copy_module.deepcopy(value, attempt)  # type: ignore[arg-type]
    except Exception:
        logger.debug("a %s cannot be copied and is kept as it is", type(value).__qualname__, exc_info=True)
        copied = value
    else:
        originals = attempt.maps[0].pop(id(attempt), None)  # short-lived; kept alive, because made has their ids
        made.update(attempt.maps[0])
        made.setdefault(id(made), []).append(originals)
    made[id(value)] = copied
    return copied
