"""Non-tensor state as plain data: nested containers and scalars in and out of bytes, nothing evaluated.

Keys survive as they are (integers, tuples, anything hashable that is plain), and an object that is not plain is
refused with its path. The format is the length of a JSON header (4 bytes, little-endian), the header, and then the
raw bytes of the byte strings and tensors that it refers to, one after the other.
"""

from __future__ import annotations

import datetime
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch

_LENGTH = struct.Struct("<I")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


class StateTreeError(TypeError):
    """An object in the state cannot travel; the message names its path and type."""


def dumps(tree: Any) -> bytes:
    """Encode ``tree``: None, bool, int, float, str, bytes, list, tuple, dict, set, timedelta, datetime and path.

    Small tensors and NumPy scalars are allowed too.

    Raises:
        StateTreeError: something else is in it.
    """
    blobs: list[bytes] = []
    try:
        encoded = _encode(tree, blobs)
    except _Refused as refused:
        raise StateTreeError(str(refused)) from None
    header = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *blobs])


def loads(data: bytes) -> Any:
    """Decode what :func:`dumps` made.

    Raises:
        ValueError: ``data`` is not that.
    """
    if len(data) < _LENGTH.size:
        raise ValueError("a state tree is cut off")
    (length,) = _LENGTH.unpack_from(data)
    header, blobs = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
    reader = _Blobs(blobs)
    tree = _decode(json.loads(header), reader)
    reader.end()
    return tree


class _Blobs:
    """Hands out the raw bytes behind the header in the order in which they were put there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def take(self, length: int) -> bytes:
        blob = self._data[self._offset : self._offset + length]
        if length < 0 or len(blob) != length:
            raise ValueError("a state tree is cut off")
        self._offset += length
        return blob

    def end(self) -> None:
        if self._offset != len(self._data):
            raise ValueError("a state tree has bytes that it does not refer to")


def _encode(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"t": "float", "v": value.hex() if value == value else "nan"}
    if kind is list:
        return _encode_items(value, blobs)
    if isinstance(value, dict):
        return {"t": "dict", "v": _encode_pairs(value, blobs)}
    if isinstance(value, tuple):
        return {"t": "tuple", "v": _encode_items(value, blobs)}
    if kind in (set, frozenset):
        return {"t": "set", "v": _encode_items(sorted(value, key=repr), blobs)}
    if kind in (bytes, bytearray):
        blobs.append(bytes(value))
        return {"t": "bytes", "v": len(value)}
    if isinstance(value, torch.Tensor):
        blobs.append(tensor_bytes(value).cpu().numpy().tobytes())
        return {"t": "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "v": len(blobs[-1])}
    if isinstance(value, PurePath):
        return {"t": "path", "v": str(value)}
    if isinstance(value, datetime.timedelta):
        return {"t": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, datetime.datetime):
        return {"t": "datetime", "v": value.isoformat()}
    if hasattr(value, "item") and getattr(value, "shape", None) == () and type(value).__module__ == "numpy":
        return _encode(value.item(), blobs)
    if isinstance(value, (int, float, str)):  # an enum or another subclass would come back as something else
        raise _Refused(f"is a {kind.__module__}.{kind.__qualname__}, which would not come back as one")
    raise _Refused(f"is a {kind.__module__}.{kind.__qualname__}, which cannot travel safely")


class _Refused(Exception):
    """A value cannot travel; on its way up it learns where it was found."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"state{''.join(reversed(self.path))} {self.why}"


def _encode_items(items: Sequence[Any], blobs: list[bytes]) -> list[Any]:
    encoded = []
    for index, item in enumerate(items):
        try:
            encoded.append(_encode(item, blobs))
        except _Refused as refused:
            refused.path.append(f"[{index}]")
            raise
    return encoded


def _encode_pairs(mapping: Mapping[Any, Any], blobs: list[bytes]) -> list[Any]:
    encoded = []
    for key, item in mapping.items():
        try:
            name = _encode(key, blobs)
        except _Refused as refused:
            refused.path.append(f" key {key!r}")
            raise
        try:
            encoded.append([name, _encode(item, blobs)])
        except _Refused as refused:
            refused.path.append(f"[{key!r}]")
            raise
    return encoded


def _decode(value: Any, blobs: _Blobs) -> Any:
    if isinstance(value, list):
        return [_decode(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    kind, body = value["t"], value["v"]
    if kind == "dict":
        return {_decode(key, blobs): _decode(item, blobs) for key, item in body}
    if kind == "tuple":
        return tuple(_decode(item, blobs) for item in body)
    if kind == "set":
        return {_decode(item, blobs) for item in body}
    if kind == "float":
        return float.fromhex(body) if body != "nan" else math.nan
    if kind == "bytes":
        return blobs.take(body)
    if kind == "tensor":
        tensor = torch.empty(value["shape"], dtype=dtype_of(value["dtype"]))
        raw = blobs.take(body)
        if raw:
            tensor_bytes(tensor).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return tensor
    if kind == "path":
        return PurePath(body)
    if kind == "timedelta":
        return datetime.timedelta(*body)
    if kind == "datetime":
        return datetime.datetime.fromisoformat(body)
    raise ValueError(f"unknown kind {kind!r} in a state tree")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` without ``torch.``, as it travels."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that :func:`dtype_name` named.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` as a flat uint8 tensor on its device: a view where it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
