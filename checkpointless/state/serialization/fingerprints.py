"""Fingerprints of values: what a value is now, to be compared with what another one is later.

It does not change when its value does. If two are equal, code that reads the values finds the same. Where
this cannot be known, they are equal only if they are of the very same object.
"""

from __future__ import annotations

import enum
import functools
import pickle
import types
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

_LARGE_BYTES = 1 << 20  # a larger tensor is known by its identity
_MOST_PARTS, _MOST_PICKLED_BYTES = 100_000, 64 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device, torch.Size)
_NAMED = (types.ModuleType, types.BuiltinFunctionType)


def _fingerprint(value: object) -> object:
    """Return a fingerprint of ``value``; what cannot be read, or is too large, is known by its identity."""
    try:
        return _Builder().of(value)
    except Exception:  # noqa: BLE001 - any class may refuse to be looked at in its own way
        return _Same(value)


def fingerprints(values: Mapping[str, object]) -> dict[str, object]:
    """Return a fingerprint of each of ``values``, by name."""
    return {name: _fingerprint(value) for name, value in values.items()}


def differing(then: Mapping[str, object], now: Mapping[str, object]) -> str | None:
    """Return the first name whose fingerprint differs, in alphabetical order; None: there is none."""
    missing = object()
    return next((name for name in sorted({*then, *now}) if then.get(name, missing) != now.get(name, missing)), None)


class _TooLargeError(Exception):
    """Raised for what is too large to be read."""


class _Same:
    """A fingerprint of an object of which nothing but its identity is known."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class _Builder:
    """Builds one fingerprint. An object that is met once more is known by when it was met first."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is given to another object meanwhile

    def of(self, value: Any) -> object:
        """Return the fingerprint of a part."""
        if value is None or isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, _NAMED):
            return _Same(value)
        if id(value) in self._met:
            return "again", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        if len(self._kept) > _MOST_PARTS:
            raise _TooLargeError
        if isinstance(value, dict | list | tuple) and getattr(
            value, "__dict__", None
        ):  # a subclass with attributes
            return type(value), self._inside(value), self.of(vars(value))
        return type(value), self._inside(value)

    def _inside(self, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict | list | tuple | set | frozenset) and len(value) > _MOST_PARTS:
            raise _TooLargeError
        if isinstance(value, dict):
            return [(self.of(key), self.of(each)) for key, each in value.items()]
        if isinstance(value, list | tuple):
            return [self.of(each) for each in value]
        if isinstance(value, functools.partial):
            return [self.of(each) for each in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if _is_transparent(value):
            return self.of(vars(value))
        digest = _pickled_digest(value)
        return _Same(value) if digest is None else digest  # what cannot be pickled is known by its identity

    def _tensor(self, tensor: torch.Tensor) -> object:
        if tensor.nbytes > _LARGE_BYTES or tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return _Same(tensor)
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return tensor.dtype, tensor.shape, str(tensor.device), bytes(flat.tolist())

    def _function(self, function: types.FunctionType) -> object:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # not yet filled
                cells.append("empty")
        return function.__code__, cells, self.of(function.__defaults__), self.of(function.__kwdefaults__)


def _is_transparent(value: object) -> bool:
    """Return whether an object is no more than its attributes: neither pickled nor compared in its own way."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not any(each.__dict__.get("__slots__") for each in kind.__mro__)
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__getstate__ is object.__getstate__
    )


def _pickled_digest(value: object) -> str | None:
    """Return a digest of what an object is pickled to; None if it cannot be pickled, or to too much."""
    digest = _BoundedDigest()
    try:
        pickle.Pickler(digest, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # noqa: BLE001 - any class may refuse in its own way
        return None
    return digest.hexdigest()


class _BoundedDigest:
    """A file that keeps a digest of what is written, up to a size."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: bytes) -> int:
        """Take ``data`` into the digest.

        Raises:
            _TooLargeError: it is too much.
        """
        self._size += len(data)
        if self._size > _MOST_PICKLED_BYTES:
            raise _TooLargeError
        self._digest.update(data)
        return len(data)

    def hexdigest(self) -> str:
        """Return the digest of all that was written."""
        return self._digest.hexdigest()
