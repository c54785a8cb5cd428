"""The types that may travel, each with its parts: a fixed table, and the classes that both sides have registered.

A name that arrives is looked up in these tables and nowhere else, so no name can make a rank import or call
anything.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import pathlib
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy
import torch

from checkpointless.state.serialization.tensor_memory import dtype_name, dtype_of, own_device

#: A nested state: containers of tensors, arrays, plain values and values of registered classes. Which classes are
#: registered is known only when the program runs, so a state is checked when it is encoded.
Tree: TypeAlias = Any

MAX_DEPTH = 100  # of containers in containers
_Class = TypeVar("_Class", bound=type)


class Refused(Exception):
    """A value cannot travel; on its way up the exception collects the path to the value."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"state{''.join(reversed(self.path))} {self.why}"


class _PlainType(NamedTuple):
    """How values of one type travel.

    Attributes:
        kind: the type; subclasses do not travel.
        take_apart: returns the parts of a value.
        make: makes a value from its parts.
    """

    kind: type
    parts: Any  # Any: a type that msgspec knows, such as a union
    take_apart: Callable[[Any], tuple[Any, ...]]
    make: Callable[..., Any]
    name: str


def _plain(
    kind: type, parts: Any, take_apart: Callable[[Any], tuple[Any, ...]], make: Any = None, name: str = ""
) -> _PlainType:
    return _PlainType(kind, parts, take_apart, make or kind, name or kind.__name__)


def _slice_parts(value: slice) -> tuple[Any, ...]:
    parts = (value.start, value.stop, value.step)
    if any(part is not None and type(part) is not int for part in parts):
        raise Refused("is a slice with other bounds than numbers: keep its bounds in a tuple")
    return parts


def _clock_parts(value: datetime.datetime | datetime.time) -> tuple[str, int]:
    zone = value.tzinfo
    offset = value.utcoffset()
    if zone is not None and (offset is None or repr(zone) != repr(_zone(offset))):
        raise Refused("is in a time zone with rules or a name: keep it in UTC")
    return value.isoformat(), value.fold


def _zone(offset: datetime.timedelta) -> datetime.timezone:
    return datetime.timezone(offset) if offset else datetime.timezone.utc


def _device(kind: str, index: int | None) -> torch.device:
    if kind == "cuda" and index is not None:
        return own_device(kind)
    return torch.device(kind) if index is None else torch.device(kind, index)


#: Types whose values nobody can change, except None, bool, int, float, str and bytes.
PLAIN_TYPES = [
    _plain(complex, tuple[float, float], lambda value: (value.real, value.imag)),
    _plain(range, tuple[int, int, int], lambda value: (value.start, value.stop, value.step)),
    _plain(slice, tuple[int | None, int | None, int | None], _slice_parts),
    _plain(datetime.timedelta, tuple[int, int, int], lambda value: (value.days, value.seconds, value.microseconds)),
    _plain(
        datetime.datetime,
        tuple[str, int],
        _clock_parts,
        lambda text, fold: datetime.datetime.fromisoformat(text).replace(fold=fold),
    ),
    _plain(datetime.date, tuple[str], lambda value: (value.isoformat(),), datetime.date.fromisoformat),
    _plain(
        datetime.time,
        tuple[str, int],
        _clock_parts,
        lambda text, fold: datetime.time.fromisoformat(text).replace(fold=fold),
    ),
    _plain(Decimal, tuple[str], lambda value: (str(value),)),
    _plain(fractions.Fraction, tuple[int, int], lambda value: (value.numerator, value.denominator)),
    _plain(pathlib.PurePosixPath, tuple[str], lambda value: (str(value),)),
    _plain(pathlib.PureWindowsPath, tuple[str], lambda value: (str(value),)),
    _plain(type(pathlib.Path()), tuple[str], lambda value: (str(value),), pathlib.Path, "Path"),
    _plain(torch.Size, tuple[int, ...], tuple, lambda *lengths: torch.Size(lengths)),
    _plain(torch.dtype, tuple[str], lambda value: (dtype_name(value),), dtype_of),
    _plain(torch.device, tuple[str, int | None], lambda value: (value.type, value.index), _device),
    _plain(numpy.str_, tuple[str], lambda value: (str(value),)),
    _plain(numpy.bytes_, tuple[bytes], lambda value: (bytes(value),)),
]

#: Numbers and texts that MessagePack cannot hold: integers of over 64 bits, and text with lone surrogates.
LARGE_INT = _plain(int, tuple[str], lambda value: (hex(value),), lambda text: int(text, 16))
ODD_TEXT = _plain(
    str,
    tuple[bytes],
    lambda value: (value.encode("utf-8", "surrogatepass"),),
    lambda data: data.decode("utf-8", "surrogatepass"),
)

# The factories with which a defaultdict may make its values.
FACTORIES: dict[str, Any] = {
    "none": None,
    **{made.__name__: made for made in (list, dict, set, int, float, str, bool, tuple, bytes, complex)},
    **{made.__name__: made for made in (collections.OrderedDict, collections.Counter, collections.deque)},
}


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
    """Return the name under which a registered class travels; None if the class is not registered."""
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
