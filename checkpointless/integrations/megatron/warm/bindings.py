"""Replaces references to what belongs to a generation that is over, in everything that is reachable."""

from __future__ import annotations

import enum
import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class _Form(enum.Enum):
    """How the references in an object are followed."""

    LEAF = enum.auto()  # there are none
    DICT = enum.auto()
    LIST = enum.auto()
    TUPLE = enum.auto()
    SET = enum.auto()
    PARTIAL = enum.auto()
    METHOD = enum.auto()
    FUNCTION = enum.auto()
    OBJECT = enum.auto()


_FORMS: Sequence[tuple[_Form, type | tuple[type, ...]]] = (
    (_Form.LEAF, _LEAVES),
    (_Form.DICT, dict),
    (_Form.LIST, list),
    (_Form.TUPLE, tuple),
    (_Form.SET, (set, frozenset)),
    (_Form.PARTIAL, functools.partial),
    (_Form.METHOD, types.MethodType),
    (_Form.FUNCTION, types.FunctionType),
)


def _form(kind: type) -> _Form:
    """Return how references in the objects of a class are followed."""
    return next((form for form, kinds in _FORMS if issubclass(kind, kinds)), _Form.OBJECT)


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
        self._forms: dict[type, _Form] = {}  # to ask for each object would take most of the time
        self.replaced = 0
        self._visits: Mapping[_Form, Callable[[Any], None]] = {
            _Form.LEAF: lambda each: None,
            _Form.DICT: lambda each: self._items(each, list(each.items())),
            _Form.LIST: lambda each: self._items(each, list(enumerate(each))),
            _Form.TUPLE: self._each,
            _Form.SET: self._each,
            _Form.PARTIAL: self._partial,
            _Form.METHOD: lambda each: self._each((each.__self__, each.__func__)),
            _Form.FUNCTION: self._function,
            _Form.OBJECT: self._attributes,
        }

    def over(self, roots: Iterable[object]) -> None:
        """Walk from ``roots``."""
        self._due = list(roots)
        while self._due:
            each = self._due.pop()
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                self._visits[self._forms.get(type(each)) or self._form(type(each))](each)

    def _next(self, value: Any) -> Any:
        """Return what is to stand in the place of ``value``; what stays is visited later."""
        form = self._forms.get(type(value)) or self._form(type(value))
        return value if form is _Form.LEAF else self._reference(value, form)

    def _reference(self, value: Any, form: _Form) -> Any:
        if id(value) in self._successors:
            self.replaced += 1
            return self._successors[id(value)]
        if form is _Form.TUPLE:
            made = [self._next(each) for each in value]
            if any(new is not old for new, old in zip(made, value)):
                return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
            return value
        if form is _Form.METHOD:  # what it is bound to cannot be replaced in it
            owner = self._next(value.__self__)
            if owner is not value.__self__:
                return types.MethodType(value.__func__, owner)
        if id(value) not in self._seen and (form is not _Form.DICT or value):  # most dicts of modules are empty
            self._due.append(value)
        return value

    def _form(self, kind: type) -> _Form:
        return self._forms.setdefault(kind, _form(kind))

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self._next(value)

    def _partial(self, each: Any) -> None:
        arguments, keywords = self._next(each.args), dict(each.keywords)
        self._items(keywords, list(keywords.items()))
        each.__setstate__((self._next(each.func), arguments, keywords, each.__dict__))

    def _items(self, container: Any, items: Iterable[tuple[Any, Any]]) -> None:
        forms, leaf = self._forms, _Form.LEAF  # most values are plain: for these no function is called
        for key, value in items:
            form = forms.get(type(value)) or self._form(type(value))
            if form is not leaf:
                new = self._reference(value, form)
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

    def _attributes(self, each: Any) -> None:
        values = getattr(each, "__dict__", None)
        if isinstance(values, dict) and values:
            self._items(values, list(values.items()))
        kind: type = type(each)
        for name in _slots(kind):
            value = getattr(each, name, None)
            new = self._next(value)
            if new is not value:
                setattr(each, name, new)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots that a class, and those it inherits from, declare in Python."""
    found: list[str] = []
    for each in kind.__mro__:
        names = each.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__"))
