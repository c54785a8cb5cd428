"""Replaces references to what belongs to a generation that is over, in everything that is reachable."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

#: Objects of these classes refer to no group of a model's; loggers lead to everything that has one.
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type,
    types.NoneType,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    logging.Logger,
)


def rebind(roots: Iterable[object], successors: Mapping[int, object]) -> int:
    """Replace every reference to an old group that can be reached from ``roots``, and methods bound to one.

    Followed are the attributes of objects and tensors, the items of containers, bound methods, partial functions,
    and the closures and defaults of functions. What only C++ refers to (hooks of a gradient's accumulation) is not.

    Args:
        roots: where to begin.
        successors: the new group, or whatever else is replaced, by the ``id`` of the old one.

    Returns:
        How many references were replaced.
    """
    walk = _Walk(successors)
    walk.over(roots)
    return walk.replaced


class _Walk:
    """One walk over all objects that can be reached."""

    def __init__(self, successors: Mapping[int, object]) -> None:
        self._successors = successors
        self._seen: dict[int, object] = {}  # the objects, too: their ids must not be given to others meanwhile
        self._due: list[Any] = []
        self.replaced = 0

    def over(self, roots: Iterable[object]) -> None:
        """Walk from ``roots``."""
        self._due = list(roots)
        while self._due:
            each = self._due.pop()
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                self._visit(each)

    def _visit(self, each: Any) -> None:
        """Replace the references that one object has, and have what it refers to visited."""
        if isinstance(each, dict):
            self._items(each, list(each.items()))
        elif isinstance(each, list):
            self._items(each, list(enumerate(each)))
        elif isinstance(each, tuple | set | frozenset):
            for value in each:
                self._next(value)
        elif isinstance(each, functools.partial):
            arguments, keywords = self._next(each.args), dict(each.keywords)
            self._items(keywords, list(keywords.items()))
            state: Any = each  # Any: typeshed leaves __setstate__ out
            state.__setstate__((self._next(each.func), arguments, keywords, each.__dict__))
        elif isinstance(each, types.MethodType):
            self._next(each.__self__)
            self._next(each.__func__)
        elif isinstance(each, types.FunctionType):
            self._function(each)
        else:
            values = getattr(each, "__dict__", None)
            if isinstance(values, dict):
                self._items(values, list(values.items()))
            for name in _slots(type(each)):  # type: ignore[arg-type]  # mypy: a class is hashable
                value = getattr(each, name, None)
                new = self._next(value)
                if new is not value:
                    setattr(each, name, new)

    def _next(self, value: Any) -> Any:
        """Return what is to stand in the place of ``value``; what stays is visited later."""
        kind = type(value)
        if _is_leaf(kind):
            return value
        if id(value) in self._successors:
            self.replaced += 1
            return self._successors[id(value)]
        if isinstance(value, tuple):
            made = [self._next(each) for each in value]
            if any(new is not old for new, old in zip(made, value)):
                return kind(*made) if hasattr(value, "_fields") else kind(made)
            return value
        if kind is types.MethodType:  # what it is bound to cannot be replaced in it
            owner = self._next(value.__self__)
            if owner is not value.__self__:
                return types.MethodType(value.__func__, owner)
        if id(value) not in self._seen:
            self._due.append(value)
        return value

    def _items(self, container: Any, items: Iterable[tuple[Any, Any]]) -> None:
        for key, value in items:
            if not _is_leaf(type(value)):  # most values are
                new = self._next(value)
                if new is not value:
                    container[key] = new

    def _function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled
                continue
            new = self._next(value)
            if new is not value:
                cell.cell_contents = new
        if function.__defaults__ is not None:
            function.__defaults__ = self._next(function.__defaults__)
        for values in (function.__kwdefaults__, function.__dict__):
            if values:
                self._items(values, list(values.items()))


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, _LEAVES)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots that a class, and those it inherits from, declare in Python."""
    found: list[str] = []
    for each in kind.__mro__:
        names = each.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__"))
