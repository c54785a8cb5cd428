"""The plain values that travel by name: a fixed table of types, and the classes that both sides have registered.

A name from the wire is looked up in these tables and nowhere else, so no name can make a rank import or call
anything.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import math
import pathlib
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from checkpointless.serialization.tensor_memory import dtype_name, dtype_of, own_device

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json

#: A nested state: containers of tensors, arrays, plain values and values of registered classes. Which classes are
#: registered is known only when the program runs, so a state is checked when it is encoded.
Tree: TypeAlias = Any

_Class = TypeVar("_Class", bound=type)
_PLAIN_INT_BITS = 64  # a larger int is written in hexadecimal: Python limits the length of decimal ones


class Refused(Exception):
    """A value cannot travel; on its way up the exception collects the path to the value."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"state{''.join(reversed(self.path))} {self.why}"


def number(value: int) -> int | str:
    """Return ``value`` in a form that JSON can hold, whatever its size."""
    return value if value.bit_length() <= _PLAIN_INT_BITS else hex(value)


def number_of(body: int | str) -> int:
    """Return the integer from which :func:`number` made ``body``."""
    return int(body, 16) if isinstance(body, str) else body


def _slice(value: slice) -> list[int | str | None]:
    parts = (value.start, value.stop, value.step)
    if any(part is not None and type(part) is not int for part in parts):
        raise Refused("is a slice with other bounds than numbers: keep its bounds in a tuple")
    return [None if part is None else number(part) for part in parts]


def _clock(value: datetime.datetime | datetime.time) -> list[Any]:
    zone = value.tzinfo
    offset = value.utcoffset()
    if zone is not None and (offset is None or repr(zone) != repr(_zone(offset))):
        raise Refused("is in a time zone with rules or a name: keep it in UTC")
    return [value.isoformat(), value.fold]


def _zone(offset: datetime.timedelta) -> datetime.timezone:
    return datetime.timezone(offset) if offset else datetime.timezone.utc


def _datetime(body: str | list[Any]) -> datetime.datetime:
    text, fold = (body, 0) if isinstance(body, str) else body
    return datetime.datetime.fromisoformat(text).replace(fold=fold)


def _device(value: torch.device) -> list[Any]:
    return [value.type, value.index]


def _device_of(body: list[Any]) -> torch.device:
    kind, index = body
    return own_device(kind) if kind == "cuda" and index is not None else torch.device(kind, index)


# Exact types whose values are one small JSON value: the type, its name on the wire, the encoder and the decoder.
_CODECS: list[tuple[type, str, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (
        complex,
        "complex",
        lambda value: [value.real.hex(), value.imag.hex()],
        lambda body: complex(*map(_float, body)),
    ),
    (
        range,
        "range",
        lambda value: [number(value.start), number(value.stop), number(value.step)],
        lambda body: range(*map(number_of, body)),
    ),
    (slice, "slice", _slice, lambda body: slice(*(None if part is None else number_of(part) for part in body))),
    (
        datetime.timedelta,
        "timedelta",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda body: datetime.timedelta(*body),
    ),
    (datetime.datetime, "datetime", _clock, _datetime),
    (datetime.date, "date", lambda value: value.isoformat(), datetime.date.fromisoformat),
    (
        datetime.time,
        "time",
        _clock,
        lambda body: datetime.time.fromisoformat(body[0]).replace(fold=body[1]),
    ),
    (Decimal, "decimal", str, Decimal),
    (
        fractions.Fraction,
        "fraction",
        lambda value: [number(value.numerator), number(value.denominator)],
        lambda body: fractions.Fraction(*map(number_of, body)),
    ),
    (pathlib.PurePosixPath, "path", str, pathlib.PurePosixPath),
    (pathlib.PureWindowsPath, "windows_path", str, pathlib.PureWindowsPath),
    (type(pathlib.Path()), "file_path", str, pathlib.Path),
    (torch.Size, "size", list, lambda body: torch.Size(body)),
    (torch.dtype, "dtype", dtype_name, dtype_of),
    (torch.device, "device", _device, _device_of),
]


def _float(body: str) -> float:
    return float.fromhex(body)


TO_JSON = {kind: (tag, to_json) for kind, tag, to_json, _ in _CODECS}
FROM_JSON = {
    "int": number_of,
    "float": _float,
    "str": lambda body: "".join(map(chr, body)),
    **{tag: from_json for _, tag, _, from_json in _CODECS},
}

# The factories with which a defaultdict may make its values.
FACTORIES: dict[str, Any] = {
    "none": None,
    **{made.__name__: made for made in (list, dict, set, int, float, str, bool, tuple, bytes, complex)},
    **{made.__name__: made for made in (collections.OrderedDict, collections.Counter, collections.deque)},
}


def scalar(value: float | str) -> Json:
    """Return a float or a str (exactly these types) in a form that JSON holds without loss."""
    if type(value) is float:
        return value if math.isfinite(value) else {"t": "float", "v": value.hex()}
    assert isinstance(value, str)
    if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        return {"t": "str", "v": [ord(each) for each in value]}  # JSON would join two surrogates
    return value


# --- the user's classes ------------------------------------------------------------------------------------------

_registered: dict[str, type] = {}


def register_plain_type(kind: _Class) -> _Class:
    """Let members or instances of ``kind`` travel between ranks and keep their class. Usable as a decorator.

    Every rank has to register the class, in a module that it imports before training starts. What arrives is looked
    up among the registered classes; no class is ever imported by a name from another rank.

    Args:
        kind: an enum, a dataclass whose fields are all given to ``__init__``, or a named tuple.

    Returns:
        ``kind``.

    Raises:
        TypeError: ``kind`` is any other class.
    """
    if not isinstance(kind, type) or not (
        issubclass(kind, enum.Enum)
        or (dataclasses.is_dataclass(kind) and all(field.init for field in dataclasses.fields(kind)))
        or is_named_tuple(kind)
    ):
        raise TypeError(
            f"{kind!r} is no enum, no dataclass with all its fields in __init__ and no named tuple: "
            "it cannot be registered"
        )
    _registered[_name(kind)] = kind
    return kind


def is_named_tuple(kind: type) -> bool:
    """Return whether ``kind`` was made by ``namedtuple`` or ``NamedTuple``."""
    return issubclass(kind, tuple) and hasattr(kind, "_make") and isinstance(getattr(kind, "_fields", None), tuple)


def registered_name(kind: type) -> str | None:
    """Return the name of a registered class on the wire; None if the class is not registered."""
    name = _name(kind)
    return name if _registered.get(name) is kind else None


def parts_of(value: Tree) -> Tree:
    """Return what a value of a registered class is made of: plain data, if the parts themselves are plain."""
    if isinstance(value, enum.Flag):
        return value.value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return list(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def made_of(name: str, parts: Tree) -> Tree:
    """Make the value that :func:`parts_of` took apart.

    Raises:
        ValueError: no class of that name is registered on this rank.
    """
    kind: Any = _registered.get(name)
    if kind is None:
        raise ValueError(f"{name} is not registered on this rank: call register_plain_type in a module it imports")
    if issubclass(kind, enum.Flag):
        return kind(parts)
    if issubclass(kind, enum.Enum):
        return kind[parts]
    return kind._make(parts) if issubclass(kind, tuple) else kind(**parts)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
