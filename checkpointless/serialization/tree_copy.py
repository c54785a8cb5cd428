"""Copies a nested state as cheaply as possible, so that nothing can change the copy any more."""

from __future__ import annotations

import copy as copy_module
import logging
import sys
from collections import ChainMap, OrderedDict, defaultdict, deque
from typing import Any, TypeVar

import torch

from checkpointless.serialization.plain_values import TO_JSON
from checkpointless.serialization.tree_encoder import MAX_DEPTH

logger = logging.getLogger(__name__)

_State = TypeVar("_State")

_IMMUTABLE = {type(None), bool, int, float, str, bytes, frozenset, type, *TO_JSON}


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
    if kind in _IMMUTABLE:
        return value
    if id(value) in made:
        return made[id(value)]
    if depth > MAX_DEPTH:
        return _copy_unknown(value, made)
    if kind is list:
        items: list[Any] = []
        made[id(value)] = items
        items.extend([item if type(item) in _IMMUTABLE else _copy(item, made, depth + 1) for item in value])
        return items
    if kind in (dict, OrderedDict, defaultdict):
        pairs: Any = defaultdict(value.default_factory) if kind is defaultdict else kind()
        made[id(value)] = pairs
        for key, item in value.items():
            known = key if type(key) in _IMMUTABLE else _copy(key, made, depth + 1)
            pairs[known] = item if type(item) in _IMMUTABLE else _copy(item, made, depth + 1)
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
    elif kind.__module__ == "numpy" and _is_plain_array(value):
        copied = value.copy(order="K")
    else:
        return _copy_unknown(value, made)
    made[id(value)] = copied
    return copied


def _is_plain_array(value: Any) -> bool:
    numpy = sys.modules["numpy"]
    return type(value) is numpy.ndarray and not value.dtype.hasobject


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
