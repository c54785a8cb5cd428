"""What modules and optimizers keep in attributes of their own, as pictures that are compared later.

What cannot be looked into is refused: an object that stays the same may have changed inside. The pictures of
:mod:`checkpointless.serialization.pictures` compare it by its identity.
"""

from __future__ import annotations

import abc
import enum
import functools
import logging
import pathlib
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from checkpointless.serialization.checksum import MemoryChecksumManager
from checkpointless.serialization.pictures import pickled_digest

_MOST_PARTS = 100_000
_HEAP_TYPE = 1 << 9  # of a class's flags: it was made by a class statement, or by a library in C that does the same
_IMMUTABLE = (
    type(None),
    type(...),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type,
    enum.Enum,
    pathlib.PurePath,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    logging.Logger,
)


_checksums = MemoryChecksumManager()


class UnknownValueError(Exception):
    """Raised for what cannot be compared later. The message is a phrase that names it."""


class ForeignPartError(UnknownValueError):
    """Raised for a module, an optimizer or a parameter that is none of the parts."""


class Attributes:
    """Makes pictures of values. Equal pictures mean that nothing has changed in between.

    Args:
        parts: modules, optimizers, parameters and buffers, which are looked at in another way: as values of
            attributes they are known by their identity. They must live as long as the pictures.
    """

    def __init__(self, parts: Iterable[object]) -> None:
        self._parts = {id(part) for part in parts}
        self._met: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is given to another object meanwhile

    def picture(self, value: object) -> object:
        """Return a picture of ``value``.

        Raises:
            UnknownValueError: it has something in it that cannot be compared later.
        """
        self._met, self._kept = {}, []
        try:
            return self._paint(value)
        finally:
            self._met, self._kept = {}, []

    def _paint(self, value: Any) -> object:
        if isinstance(value, _IMMUTABLE) or _is_numpy_number(value):
            return type(value), value
        if id(value) in self._parts:
            return "part", id(value)
        if id(value) in self._met:
            return "again", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        if len(self._kept) > _MOST_PARTS:
            raise UnknownValueError("more values than are compared")
        return type(value), self._inside(value)

    def _inside(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.nn.Module):
            raise UnknownValueError("a module that is no part of what was built")
        if isinstance(value, torch.Size):
            return tuple(value)
        found = self._items(value)
        if found is None:
            found = self._function(value)
        if found is None:
            if not _is_transparent(value):
                return self._opaque(value)
            found = ()
        own = getattr(value, "__dict__", None)
        return found, (tuple((name, self._paint(each)) for name, each in own.items()) if own else ())

    def _tensor(self, tensor: torch.Tensor) -> object:
        raise UnknownValueError("a tensor that is neither a parameter nor a buffer")

    def _opaque(self, value: object) -> object:
        raise UnknownValueError(f"a {type(value).__qualname__}, of which it is not known what it keeps")

    def _items(self, value: Any) -> object | None:
        """Return the picture of what a container holds; None: it is no container."""
        if isinstance(value, dict):
            items = tuple((self._paint(key), self._paint(each)) for key, each in value.items())
            return items, self._paint(getattr(value, "default_factory", None))
        if isinstance(value, list | tuple | deque):
            return tuple(self._paint(each) for each in value)
        if isinstance(value, set | frozenset):
            return frozenset(self._paint(each) for each in value)
        return None

    def _function(self, value: Any) -> object | None:
        """Return the picture of what a function refers to; None: it is no function."""
        if isinstance(value, weakref.ref):
            return self._paint(value())
        if isinstance(value, functools.partial):
            return self._paint(value.func), self._paint(value.args), self._paint(value.keywords)
        if isinstance(value, types.MethodType):
            return self._paint(value.__func__), self._paint(value.__self__)
        if not isinstance(value, types.FunctionType):
            return None
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(self._paint(cell.cell_contents))
            except ValueError:  # not yet filled
                cells.append("empty")
        return value.__code__, tuple(cells), self._paint(value.__defaults__), self._paint(value.__kwdefaults__)


class Arguments(Attributes):
    """Makes pictures of what a function refers to: no module, but also settings and data of any kind.

    Plain tensors that are not trained are known by what is in them, and objects that cannot be looked into by what
    they are pickled to.
    """

    def _inside(self, value: Any) -> object:
        if isinstance(value, torch.nn.Module | torch.nn.Parameter | torch.optim.Optimizer):
            raise ForeignPartError(f"a {type(value).__name__} that keep() did not return")
        return super()._inside(value)

    def _tensor(self, tensor: torch.Tensor) -> object:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            raise UnknownValueError(f"a {type(tensor).__name__} that is no plain tensor")
        if tensor.requires_grad:
            raise UnknownValueError("a tensor that is trained")
        return tensor.dtype, tensor.shape, tensor.device, _checksums.digest_each({(0,): tensor})[0,]

    def _opaque(self, value: object) -> object:
        digest = pickled_digest(value)
        return super()._opaque(value) if digest is None else digest


def is_immutable(value: object) -> bool:
    """Return whether nobody can change ``value`` in place."""
    return isinstance(value, _IMMUTABLE)


def _is_numpy_number(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _is_transparent(value: object) -> bool:
    """Return whether an object is no more than its attributes."""
    kind = type(value)
    own = [each for each in kind.__mro__ if each is not object]
    return (
        hasattr(value, "__dict__")
        and all(type(each) in (type, abc.ABCMeta) and each.__flags__ & _HEAP_TYPE for each in own)
        and not any(each.__dict__.get("__slots__") for each in own)
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
    )
