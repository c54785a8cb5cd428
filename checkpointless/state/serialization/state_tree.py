"""A nested state as bytes and tensors: what comes back is what was sent, type for type, or it is refused.

Keys survive as they are (integers, tuples, anything hashable that is plain), and what is shared inside the state
stays shared. An object that is not plain is refused with its path. Nothing is evaluated, imported or unpickled.

The format is MessagePack, written and read by msgspec. None, booleans, integers, floats, texts, byte strings and
lists stand for themselves. Any other value is a map with one entry: the name of its type, and the row of its parts;
``{"same": N}`` is the value that ended as number N. Large tensors and arrays are kept separately (:func:`split`),
so that they can be moved in buckets.
"""

from __future__ import annotations

import collections
import copy as copy_module
import dataclasses
import datetime
import enum
import fractions
import logging
import pathlib
import re
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy
import torch

from checkpointless.state.serialization.tensor_memory import dtype_name, dtype_of, own_device, tensor_bytes

# --- The types that may travel ------------------------------------------------------------------------------------
#
# They are a fixed table, and the classes that both sides have registered. A name that arrives is looked up in these
# and nowhere else, so no name can make a rank import or call anything.

#: A nested state: containers of tensors, arrays, plain values and values of registered classes. Which classes are
#: registered is known only when the program runs, so a state is checked when it is encoded.
Tree: TypeAlias = Any

MAX_DEPTH = 100  # of containers in containers
_Class = TypeVar("_Class", bound=type)


class _Refused(Exception):
    """A value cannot travel; on its way up the exception collects the path to the value."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"state{''.join(reversed(self.path))} {self.why}"


class _PlainType(NamedTuple):
    """How values of one type travel; subclasses of ``kind`` do not."""

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
        raise _Refused("is a slice with other bounds than numbers: keep its bounds in a tuple")
    return parts


def _clock_parts(value: datetime.datetime | datetime.time) -> tuple[str, int]:
    zone = value.tzinfo
    offset = value.utcoffset()
    if zone is not None and (offset is None or repr(zone) != repr(datetime.timezone(offset))):
        raise _Refused("is in a time zone with rules or a name: keep it in UTC")
    return value.isoformat(), value.fold


def _clock(kind: Any, text: str, fold: int) -> datetime.datetime | datetime.time:
    return kind.fromisoformat(text).replace(fold=fold)


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
    _plain(datetime.datetime, tuple[str, int], _clock_parts, partial(_clock, datetime.datetime)),
    _plain(datetime.date, tuple[str], lambda value: (value.isoformat(),), datetime.date.fromisoformat),
    _plain(datetime.time, tuple[str, int], _clock_parts, partial(_clock, datetime.time)),
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


def _parts_of(value: Tree) -> Tree:
    """Return what a value of a registered class is made of: plain data, if the parts themselves are plain."""
    if isinstance(value, enum.Flag):
        return value.value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple):
        return list(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _made_of(name: str, parts: Tree) -> Tree:
    """Make the value that :func:`_parts_of` took apart; no class is imported by its name."""
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


# --- Copies of state, taken at every step boundary, which get their form when asked for ---------------------------

logger = logging.getLogger(__name__)

_State = TypeVar("_State")

#: Types whose values nobody can change.
IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes})
_UNCHANGING = {*IMMUTABLE, frozenset, type, *(each.kind for each in PLAIN_TYPES)}  # nor what is in them


def is_fixed(value: object) -> bool:
    return type(value) in IMMUTABLE or (type(value) is tuple and all(map(is_fixed, value)))


class Later(Generic[_State]):
    """State of a point that is over; ``make`` makes plain data of it, of nothing that changes after the point."""

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
    """Copy ``tensors`` as they are now, without gradients, as cheaply as possible. Return what makes the copies."""
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
    """Return a deep copy of ``tree``; what is in two places stays one object. Others go by ``copy.deepcopy``."""
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


INLINE_BYTES = 4096  # a tensor up to this size is copied into the skeleton: a separate message takes longer
MAX_BYTES = 2 * 1024 * 1024 * 1024  # limit of everything but large tensors and arrays
_KEY_LENGTH = 60
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcmMSUV]\d+(\[\w+\])?")  # raw memory, without objects or records

_Node: TypeAlias = Any  # a value in the form in which it travels
_Length = Annotated[int, msgspec.Meta(ge=0)]
_BY_TYPE = {each.kind: each for each in PLAIN_TYPES}
_BY_NAME = {each.name: each for each in (*PLAIN_TYPES, LARGE_INT, ODD_TEXT)}
_DICTS = (dict, OrderedDict, Counter, defaultdict)
# The exceptions that a damaged or forged tree may raise while it is decoded.
_UNREADABLE = (
    *(msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError),
    *(ArithmeticError, RecursionError, RuntimeError, MemoryError),
)


class StateTreeError(TypeError):
    """An object in the state cannot travel; the message names its path and type, and says what to do."""


def dumps(tree: Tree) -> bytes:
    """Encode ``tree``, tensors and arrays included.

    Allowed are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, deque, dict, OrderedDict,
    Counter, defaultdict (of a built-in type), set, frozenset, range, slice, date, time, datetime, timedelta,
    Decimal, Fraction, paths, ``torch.Size``, ``dtype`` and ``device``, dense tensors and parameters, NumPy scalars
    and arrays, and classes given to :func:`register_plain_type`: exactly these types, no subclasses of them.

    Raises:
        StateTreeError: ``tree`` contains anything else.
    """
    return _packed(tree, _Encoder(None, _as_it_is))


def loads(data: bytes) -> Tree:
    """Decode what :func:`dumps` made; raise ``ValueError`` if it was not."""
    return join(data, ())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def split(
    tree: Tree, inline_bytes: int = INLINE_BYTES, taken: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
) -> tuple[bytes, list[torch.Tensor]]:
    """Encode ``tree`` (:func:`dumps`) without tensors over ``inline_bytes`` (-1: any), as ``taken`` returns them.

    Return the rest, and the tensors, which share the originals' memory if these have no gaps. ``StateTreeError`` if
    something cannot travel.
    """
    encoder = _Encoder(inline_bytes, taken)
    return _packed(tree, encoder), encoder.tensors


def _where_it_was(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if tensor.device.type != kind:
        raise ValueError("a state tree refers to another tensor")
    return tensor


def join(
    skeleton: bytes,
    tensors: Sequence[torch.Tensor],
    placed: Callable[[torch.Tensor, str], torch.Tensor] = _where_it_was,
) -> Tree:
    """Put together what :func:`split` took apart, of ``tensors`` themselves, each where ``placed`` has it.

    Raises:
        ValueError: ``skeleton`` is damaged, or belongs to other tensors.
    """
    try:
        return _Decoder(tensors, placed).decode(msgspec.msgpack.decode(skeleton))
    except _UNREADABLE as error:
        raise ValueError(f"a state tree cannot be read: {type(error).__name__}: {error}") from error


def check(tree: object) -> None:
    """Raise ``StateTreeError`` (one line: path, type and what to do) if ``tree`` cannot travel; nothing is read."""
    checker = _Encoder(INLINE_BYTES, _as_it_is, only_checks=True)
    _encoded(tree, checker)
    _bounded(checker.nbytes)


def _encoded(tree: Tree, encoder: _Encoder) -> _Node:
    try:
        return encoder.encode(tree)
    except _Refused as refused:
        raise StateTreeError(str(refused)) from None
    except RecursionError:
        raise StateTreeError("state is nested too deep for the stack: keep a flatter state") from None


def _packed(tree: Tree, encoder: _Encoder) -> bytes:
    node = _encoded(tree, encoder)
    _bounded(encoder.nbytes)
    packed = msgspec.msgpack.encode(node)
    _bounded(len(packed))
    return packed


def _bounded(nbytes: int) -> None:
    if nbytes > MAX_BYTES:
        raise StateTreeError(f"state has {nbytes} bytes outside of tensors, over {MAX_BYTES}: keep them in tensors")


class _Tensor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor: the order of its dimensions in memory, and its bytes or its number among the other tensors."""

    dtype: str
    device: str
    shape: tuple[_Length, ...]
    order: tuple[_Length, ...] | None
    is_parameter: bool
    requires_grad: bool
    memory: bytes | _Length


class _Array(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A NumPy array; ``is_turned`` if its first dimension is the densest one in memory."""

    dtype: str
    shape: tuple[_Length, ...]
    is_turned: bool
    memory: bytes | _Length


class _Encoder:
    """Turns one tree into nodes. A container inside itself is refused; one met again becomes a reference.

    All lists and values with a name are numbered in the order in which they end. ``nbytes`` counts bytes that are
    neither plain values nor in ``tensors``; without ``inline_bytes`` all tensors are encoded with the rest.
    """

    def __init__(
        self, inline_bytes: int | None, taken: Callable[[torch.Tensor], torch.Tensor], only_checks: bool = False
    ) -> None:
        self.nbytes = 0
        self._only_checks = only_checks  # reads no memory
        self._taken = taken
        self.tensors: list[torch.Tensor] = []
        self._inline_bytes = inline_bytes
        self._open: set[int] = set()
        self._done: dict[int, tuple[_Node, Tree]] = {}  # by id: what stands for a value, which keeps the id
        self._in_key = False

    def encode(self, value: Tree) -> _Node:
        kind = type(value)
        if kind is str:
            if value.isascii() or _is_text(value):
                return value
        elif kind is int:
            if -(1 << 63) <= value < 1 << 63:
                return value
        elif kind is float or value is None or kind is bool:
            return value
        elif kind is bytes:
            self.nbytes += len(value)
            return value
        done = self._done.get(id(value))
        if done is not None:
            return done[0]
        if id(value) in self._open:
            raise _Refused(f"is the {kind.__name__} that it is in: keep a state without cycles")
        if len(self._open) >= MAX_DEPTH:
            raise _Refused(f"is nested more than {MAX_DEPTH} deep: keep a flatter state")
        self._open.add(id(value))
        name, parts = self._parts(value, kind)
        self._open.discard(id(value))  # a refusal ends the walk, and with it the use of it
        self._done[id(value)] = {"same": len(self._done)}, value
        return parts if name == "list" else {name: parts}

    def _memory(self, nbytes: int, read: Callable[[], torch.Tensor]) -> bytes | int:
        is_inline = self._inline_bytes is None or nbytes <= self._inline_bytes
        self.nbytes += nbytes if is_inline else 0
        if self._only_checks:
            return 0
        if is_inline:
            return tensor_bytes(read()).cpu().numpy().tobytes()
        self.tensors.append(read())
        return len(self.tensors) - 1

    def _parts(self, value: Tree, kind: type) -> tuple[str, _Node]:
        name = kind.__name__
        if kind is list or kind is tuple:
            return name, self._items(value)
        if kind in _DICTS:
            return name, [*self._head(value), *self._pairs(value)]
        if kind is deque:
            return name, [value.maxlen, *self._items(value)]
        if kind is set or kind is frozenset:
            return name, list(map(self._key, sorted(value, key=repr)))
        if kind is bytearray:
            self.nbytes += len(value)
            return name, [value]
        if isinstance(value, torch.Tensor):
            return "tensor", self._tensor(value)
        if isinstance(value, numpy.ndarray):
            return "array", self._array(value)
        plain = LARGE_INT if kind is int else ODD_TEXT if kind is str else _BY_TYPE.get(kind)
        if plain is not None:
            return plain.name, [self.encode(part) for part in plain.take_apart(value)]
        if isinstance(value, numpy.generic):
            return "scalar", [_dtype_str(value.dtype), value.tobytes()]
        if _registered.get(_name(kind)) is kind:
            return "registered", [_name(kind), self.encode(_parts_of(value))]
        raise _Refused(f"is {_a(kind)}, which cannot be given to another rank: {_advice(value, kind)}")

    def _items(self, items: Iterable[Tree]) -> list[_Node]:
        return [self._part(item, "[{}]", index) for index, item in enumerate(items)]

    def _pairs(self, mapping: dict[Tree, Tree]) -> list[_Node]:
        encoded: list[_Node] = []
        for key, item in mapping.items():
            encoded += [self._key(key), self._part(item, "[{}]", key)]
        return encoded

    def _key(self, key: Tree) -> _Node:
        if type(key) is str or type(key) is int:
            return self.encode(key)
        outer, self._in_key = self._in_key, True
        try:
            return self._part(key, " key {}", key)
        finally:
            self._in_key = outer

    def _part(self, value: Tree, place: str, name: object) -> _Node:
        try:
            return self.encode(value)
        except _Refused as refused:
            refused.path.append(place.format(_short(name)))
            raise

    def _head(self, mapping: Any) -> list[_Node]:
        if type(mapping) is defaultdict:
            names = [name for name, factory in FACTORIES.items() if factory is mapping.default_factory]
            if not names:
                raise _Refused(
                    f"is a defaultdict of {_short(mapping.default_factory)}, which another rank cannot be given: "
                    f"keep a dict, or a defaultdict of one of {', '.join(FACTORIES)}"
                )
            return names[:1]
        extra = getattr(mapping, "__dict__", {})
        if extra and (type(mapping) is not OrderedDict or extra.keys() != {"_metadata"}):  # of state_dict()
            raise _Refused(f"has attributes ({', '.join(map(str, extra))}) besides its items: keep a plain dict")
        return [self.encode(extra.get("_metadata"))] if type(mapping) is OrderedDict else []

    def _tensor(self, given: torch.Tensor) -> _Tensor:
        tensor = self._taken(given)
        kind = type(tensor)
        if self._in_key:
            raise _Refused("is a tensor as a key: use a name or a number")
        if kind not in (torch.Tensor, torch.nn.Parameter):
            raise _Refused(f"is {_a(kind)}, a special tensor: keep its local, plain tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
            what = "quantized" if tensor.is_quantized else f"{tensor.layout}, on {tensor.device.type}"
            raise _Refused(f"is a tensor without plain memory ({what}): keep a dense tensor on a CPU or a GPU")
        order = _dense_order(tensor)

        def plain() -> torch.Tensor:
            found = tensor.detach().resolve_conj().resolve_neg()
            return found if order is None else found.permute(order)

        return _Tensor(
            dtype_name(tensor.dtype),
            tensor.device.type,
            tuple(tensor.shape),
            order,
            kind is torch.nn.Parameter,
            tensor.requires_grad,
            self._memory(tensor.numel() * tensor.element_size(), plain),
        )

    def _array(self, array: Any) -> _Array:
        if type(array) is not numpy.ndarray:
            raise _Refused(f"is {_a(type(array))}, a special array: keep a plain one, numpy.array(...)")
        is_turned = array.flags.f_contiguous and not array.flags.c_contiguous
        plain = array.T if is_turned else array
        dtype = _dtype_str(array.dtype)  # refuses before memory is read
        return _Array(dtype, array.shape, is_turned, self._memory(array.nbytes, lambda: _array_memory(plain)))


class _Decoder:
    """Decodes one tree; trusts nothing that it reads."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], placed: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> None:
        self._tensors = tensors
        self._placed = placed
        self._made: list[Tree] = []  # in the order in which they were finished

    def decode(self, node: _Node) -> Tree:
        if node is None or type(node) in (str, int, float, bool, bytes):
            return node
        if type(node) is list:
            made: Tree = [self.decode(part) for part in node]
        else:
            ((name, parts),) = node.items()
            if name == "same":
                if type(parts) is not int or not 0 <= parts < len(self._made):
                    raise ValueError("a state tree refers to a missing value")
                return self._made[parts]
            made = self._value(name, parts)
        self._made.append(made)
        return made

    def _value(self, name: str, parts: list[_Node]) -> Tree:
        if name == "tensor":
            return self._tensor(msgspec.convert(parts, _Tensor))
        if name == "array":
            return self._array(msgspec.convert(parts, _Array))
        values = [self.decode(part) for part in parts]
        if name in _BY_NAME:
            plain = _BY_NAME[name]
            return plain.make(*msgspec.convert(values, plain.parts))
        if name in _MAKERS:
            return _MAKERS[name](*values)
        raise ValueError(f"unknown type {name!r} in a state tree")

    def _tensor(self, node: _Tensor) -> torch.Tensor:
        dtype, shape, order = dtype_of(node.dtype), torch.Size(node.shape), node.order
        if order is not None and sorted(order) != list(range(len(shape))):
            raise ValueError(f"a tensor {tuple(shape)} has its dimensions in the order {order}")
        laid_out = shape if order is None else torch.Size([shape[dim] for dim in order])
        if isinstance(node.memory, int):
            tensor = self._tensors[node.memory]
            if tensor.dtype != dtype or tensor.shape != laid_out:
                raise ValueError("a state tree refers to another tensor")
            tensor = self._placed(tensor, node.device)
        else:
            if shape.numel() * dtype.itemsize != len(node.memory):
                raise ValueError(f"a tensor {tuple(shape)} has {len(node.memory)} bytes")
            tensor = torch.empty(laid_out, dtype=dtype)
            if node.memory:
                tensor_bytes(tensor).copy_(torch.frombuffer(bytearray(node.memory), dtype=torch.uint8))
            tensor = tensor.to(own_device(node.device))
        if order is not None:
            tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
        if node.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=node.requires_grad)
        return tensor.requires_grad_() if node.requires_grad else tensor

    def _array(self, node: _Array) -> Any:
        flat: Any = (
            self._tensors[node.memory].cpu().numpy()
            if isinstance(node.memory, int)
            else numpy.frombuffer(bytearray(node.memory), dtype=numpy.uint8)
        )
        array = flat.view(_numpy_dtype(node.dtype)).reshape(node.shape[::-1] if node.is_turned else node.shape)
        return array.T if node.is_turned else array


def _pairs_of(row: Sequence[Tree]) -> Iterable[tuple[Tree, Tree]]:
    return zip(row[::2], row[1::2], strict=True)


def _ordered_of(metadata: Tree, *row: Tree) -> Tree:
    ordered: Any = OrderedDict(_pairs_of(row))
    if metadata is not None:
        ordered._metadata = metadata
    return ordered


_MAKERS: dict[str, Callable[..., Tree]] = {
    "tuple": lambda *items: items,
    "deque": lambda maxlen, *items: deque(items, maxlen),
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "dict": lambda *row: dict(_pairs_of(row)),
    "OrderedDict": _ordered_of,
    "Counter": lambda *row: Counter(dict(_pairs_of(row))),
    "defaultdict": lambda factory, *row: defaultdict(FACTORIES[factory], _pairs_of(row)),
    "bytearray": lambda data: bytearray(memoryview(data)),  # no number: bytearray(n) would be n bytes
    "scalar": lambda dtype, data: numpy.frombuffer(data, dtype=_numpy_dtype(dtype))[0],
    "registered": _made_of,
}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which ``tensor`` is contiguous; None if it is so anyway, or has gaps."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else None


def _array_memory(array: Any) -> torch.Tensor:
    """Return the memory of an array as a flat tensor of bytes, in the order of its items; shared if possible."""
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


def _dtype_str(dtype: Any) -> str:
    """Return the ``str`` of a NumPy dtype, if that describes the dtype completely."""
    if dtype.hasobject:
        raise _Refused("is a NumPy array of objects: keep a list, or an array of numbers")
    text = str(dtype.str)
    if not _ARRAY_DTYPE.fullmatch(text) or numpy.dtype(text) != dtype or not dtype.itemsize:
        raise _Refused(f"has the NumPy dtype {dtype}, which is not plain memory: keep plain numbers")
    return text


def _numpy_dtype(text: str) -> Any:
    if not _ARRAY_DTYPE.fullmatch(text):
        raise ValueError(f"unknown NumPy dtype {text!r}")
    return numpy.dtype(text)


def _a(kind: type) -> str:
    return f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")


def _advice(value: object, kind: type) -> str:
    if isinstance(value, (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)):
        base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
        return f"keep a plain {base.__name__}, or call register_plain_type with its class"
    if isinstance(value, torch.nn.Module):
        return "keep its state_dict()"
    if callable(value):
        return "keep what it needs as plain values and make it again when the state is loaded"
    return (
        "keep plain values, tensors or NumPy arrays, or call register_plain_type with its class "
        "if it is an enum, a dataclass or a named tuple"
    )


def _short(key: object) -> str:
    text = " ".join(repr(key).split())
    return text if len(text) <= _KEY_LENGTH else text[: _KEY_LENGTH - 3] + "..."
