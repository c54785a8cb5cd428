"""Turns a nested state into JSON nodes and raw memory, or says what in it cannot travel.

One walk serves three purposes, which differ in what happens to the memory (:class:`Sink`): sending it, checking
that it could be sent, and digesting it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import xxhash

from checkpointless.serialization.checksum import digest_bytes
from checkpointless.serialization.plain_values import (
    FACTORIES,
    TO_JSON,
    Refused,
    Tree,
    number,
    parts_of,
    registered_name,
    scalar,
)
from checkpointless.serialization.tensor_memory import dtype_name, tensor_bytes

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json, Parsed

MAX_DEPTH = 100
ARRAY_DTYPE = re.compile(r"[<>|=][biufcmMSUV]\d+(\[\w+\])?")  # raw memory, without objects or records
_DICTS = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "defaultdict"}
_SEQUENCES = {tuple: "tuple", deque: "deque", set: "set", frozenset: "frozenset"}
_KEY_LENGTH = 60


class Sink(Protocol):
    """Takes the memory that is not JSON.

    Attributes:
        canonical: whether equal states must give equal nodes, however containers are shared and tensors laid out.
    """

    canonical: bool

    def raw(self, nbytes: int, read: Callable[[], bytes]) -> int | str:
        """Take bytes, and return what stands for them in the node."""

    def memory(self, nbytes: int, tensor: Callable[[], torch.Tensor]) -> dict[str, Json]:
        """Take the memory of a tensor, and return the fields of the node that stand for it."""


class Sender:
    """Copies small memory into one row of bytes, and takes large tensors as they are.

    Args:
        inline_bytes: the size in bytes of the largest tensor that is copied; None: all tensors are copied.
    """

    canonical = False

    def __init__(self, inline_bytes: int | None) -> None:
        self.blobs: list[bytes] = []
        self.tensors: list[torch.Tensor] = []
        self._inline_bytes = inline_bytes

    def raw(self, nbytes: int, read: Callable[[], bytes]) -> int:
        self.blobs.append(read())
        return nbytes

    def memory(self, nbytes: int, tensor: Callable[[], torch.Tensor]) -> dict[str, Json]:
        if self._inline_bytes is None or nbytes <= self._inline_bytes:
            return {"v": self.raw(nbytes, lambda: tensor_bytes(tensor()).cpu().numpy().tobytes())}
        self.tensors.append(tensor())
        return {"at": len(self.tensors) - 1}


class Checker:
    """Takes nothing, and counts the bytes that would have been copied into one row."""

    canonical = False

    def __init__(self, inline_bytes: int) -> None:
        self.nbytes = 0
        self._inline_bytes = inline_bytes

    def raw(self, nbytes: int, read: Callable[[], bytes]) -> int:
        self.nbytes += nbytes
        return nbytes

    def memory(self, nbytes: int, tensor: Callable[[], torch.Tensor]) -> dict[str, Json]:
        self.nbytes += nbytes if nbytes <= self._inline_bytes else 0
        return {}


class Digester:
    """Takes the digest of all memory."""

    canonical = True

    def raw(self, nbytes: int, read: Callable[[], bytes]) -> str:
        return xxhash.xxh3_128_hexdigest(read())

    def memory(self, nbytes: int, tensor: Callable[[], torch.Tensor]) -> dict[str, Json]:
        return {"v": f"{digest_bytes(tensor_bytes(tensor())):016x}"}


class Encoder:
    """Encodes one tree.

    A container or tensor that is met again becomes a reference to its first occurrence. Encoder and decoder number
    containers and tensors in the order in which they end. A container inside itself is refused.

    Args:
        sink: takes the memory.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._open: set[int] = set()
        self._done: dict[int, tuple[int, Json, Tree]] = {}  # by id: number, node, and the value, which keeps the id
        self._in_key = False

    def encode(self, value: Tree) -> Json:
        """Return the node of ``value``.

        Raises:
            Refused: ``value`` cannot travel.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            found = number(value)
            return value if found is value else {"t": "int", "v": found}
        if kind is float or kind is str:
            return scalar(value)
        if kind is bytes:
            return {"t": "bytes", "v": self._sink.raw(len(value), lambda: value)}
        if kind in TO_JSON:
            tag, to_json = TO_JSON[kind]
            return {"t": tag, "v": to_json(value)}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return _numpy_scalar(value)
        done = self._done.get(id(value))
        if done is not None:
            return done[1] if self._sink.canonical else {"t": "same", "v": done[0]}
        if id(value) in self._open:
            raise Refused(f"is the {kind.__name__} that it is in: keep a state without cycles")
        if len(self._open) >= MAX_DEPTH:
            raise Refused(f"is nested more than {MAX_DEPTH} deep: keep a flatter state")
        self._open.add(id(value))
        node = self._compound(value, kind)
        self._open.discard(id(value))
        self._done[id(value)] = (len(self._done), node, value)
        return node

    def _compound(self, value: Tree, kind: type) -> Json:
        """Return the node of a numbered value. A refusal ends the walk, and with it the use of ``_open``."""
        if kind is list:
            return self._items(value)
        if kind in _DICTS:
            return {"t": _DICTS[kind], **self._more(value), "v": self._pairs(value.items())}
        if kind in _SEQUENCES:
            if kind is deque:
                return {"t": "deque", "max": value.maxlen, "v": self._items(value)}
            if kind is tuple:
                return {"t": "tuple", "v": self._items(value)}
            return {"t": _SEQUENCES[kind], "v": self._keys(value)}
        if kind is bytearray:
            return {"t": "bytearray", "v": self._sink.raw(len(value), lambda: bytes(value))}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value, numpy)
        name = registered_name(kind)
        if name is not None:
            return {"t": "registered", "of": name, "v": self.encode(parts_of(value))}
        raise Refused(f"is {_a(kind)}, which cannot be given to another rank: {_advice(value, kind)}")

    def _items(self, items: Iterable[Tree]) -> list[Json]:
        encoded = []
        for index, item in enumerate(items):
            try:
                encoded.append(self.encode(item))
            except Refused as refused:
                refused.path.append(f"[{index}]")
                raise
        return encoded

    def _pairs(self, pairs: Iterable[tuple[Tree, Tree]]) -> list[Json]:
        encoded: list[Json] = []
        for key, item in pairs:
            name = self._key(key)
            try:
                encoded.append([name, self.encode(item)])
            except Refused as refused:
                refused.path.append(f"[{_short(key)}]")
                raise
        return encoded

    def _keys(self, keys: Iterable[Tree]) -> list[Json]:
        return [self._key(key) for key in sorted(keys, key=repr)]  # the same order on every rank

    def _key(self, key: Tree) -> Json:
        if type(key) is str or type(key) is int:
            return self.encode(key)
        outer, self._in_key = self._in_key, True
        try:
            return self.encode(key)
        except Refused as refused:
            refused.path.append(f" key {_short(key)}")
            raise
        finally:
            self._in_key = outer

    def _more(self, mapping: Any) -> dict[str, Json]:
        """Return what a dictionary has beside its items."""
        if type(mapping) is defaultdict:
            names = [name for name, factory in FACTORIES.items() if factory is mapping.default_factory]
            if not names:
                raise Refused(
                    f"is a defaultdict of {_short(mapping.default_factory)}, which another rank cannot be given: "
                    f"keep a dict, or a defaultdict of one of {', '.join(FACTORIES)}"
                )
            return {"of": names[0]}
        extra = getattr(mapping, "__dict__", {})
        if not extra:
            return {}
        if type(mapping) is OrderedDict and extra.keys() == {"_metadata"}:  # of a module's state_dict()
            return {"metadata": self.encode(extra["_metadata"])}
        raise Refused(f"has attributes ({', '.join(map(str, extra))}) besides its items: keep a plain dict")

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Json]:
        kind = type(tensor)
        if self._in_key:
            raise Refused("is a tensor as a key: use a name or a number")
        if kind not in (torch.Tensor, torch.nn.Parameter):
            raise Refused(f"is {_a(kind)}, a special tensor: keep its local, plain tensor")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
            what = "quantized" if tensor.is_quantized else f"{tensor.layout}, on {tensor.device.type}"
            raise Refused(f"is a tensor without plain memory ({what}): keep a dense tensor on a CPU or a GPU")
        node: dict[str, Json] = {"t": "tensor", "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        if tensor.device.type != "cpu":
            node["device"] = tensor.device.type
        if kind is torch.nn.Parameter:
            node["parameter"] = True
        if tensor.requires_grad:
            node["grad"] = True
        order = None if self._sink.canonical else _dense_order(tensor)
        if order is not None:
            node["order"] = order

        def plain() -> torch.Tensor:
            found = tensor.detach().resolve_conj().resolve_neg()
            return found if order is None else found.permute(order)

        return {**node, **self._sink.memory(tensor.numel() * tensor.element_size(), plain)}

    def _array(self, array: Any, numpy: Any) -> dict[str, Json]:
        if type(array) is not numpy.ndarray:
            raise Refused(f"is {_a(type(array))}, a special array: keep a plain one, numpy.array(...)")
        node: dict[str, Json] = {"t": "array", "dtype": _dtype_str(array.dtype), "shape": list(array.shape)}
        turned = not self._sink.canonical and array.flags.f_contiguous and not array.flags.c_contiguous
        if turned:
            node["order"] = "F"
        return {
            **node,
            **self._sink.memory(array.nbytes, lambda: _array_memory(array.T if turned else array, numpy)),
        }


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of dimensions in which ``tensor`` is contiguous; None if it is so anyway, or has gaps."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return order if tensor.permute(order).is_contiguous() else None


def _array_memory(array: Any, numpy: Any) -> torch.Tensor:
    """Return the memory of an array as a flat tensor of bytes, in the order of its items; shared if possible."""
    flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


def _dtype_str(dtype: Any) -> str:
    """Return the ``str`` of a NumPy dtype, if that describes the dtype completely."""
    if dtype.hasobject:
        raise Refused("is a NumPy array of objects: keep a list, or an array of numbers")
    text = str(dtype.str)
    if not ARRAY_DTYPE.fullmatch(text) or sys.modules["numpy"].dtype(text) != dtype or not dtype.itemsize:
        raise Refused(f"has the NumPy dtype {dtype}, which is not plain memory: keep plain numbers")
    return text


def _numpy_scalar(value: Any) -> dict[str, Json]:
    if isinstance(value, str):
        return {"t": "numpy_str", "v": scalar(str(value))}
    if isinstance(value, bytes):
        return {"t": "numpy_bytes", "v": value.hex()}
    return {"t": "numpy", "dtype": _dtype_str(value.dtype), "v": value.tobytes().hex()}


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


def canonical_digest(node: Json) -> str:
    """Return the digest of a node of :class:`Digester`, whatever the order in dictionaries and sets."""
    return _digest_node(node, {}).hex()


_UNORDERED = {"dict", "counter", "defaultdict", "set", "frozenset"}


def _digest_node(node: Parsed, seen: dict[int, bytes]) -> bytes:
    if isinstance(node, (list, dict)) and id(node) in seen:
        return seen[id(node)]
    if isinstance(node, list):
        digest = _joined("list", [_digest_node(each, seen) for each in node])
    elif isinstance(node, dict):
        parts: list[bytes] = []
        for name in sorted(node):
            if name == "v" and node["t"] in _UNORDERED:
                parts.append(_joined("any order", sorted(_digest_node(each, seen) for each in node["v"])))
            else:
                parts.append(_joined(name, [_digest_node(node[name], seen)]))
        digest = _joined("node", parts)
    else:
        return xxhash.xxh3_128_digest(f"{type(node).__name__} {node!r}".encode())
    seen[id(node)] = digest
    return digest


def _joined(what: str, digests: Sequence[bytes]) -> bytes:
    return xxhash.xxh3_128_digest(what.encode() + b":" + b"".join(digests))
