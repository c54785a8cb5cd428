"""Digests of values that are not just tensors: the state of a callback, of a module or of a data module."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
import xxhash

from checkpointless.serialization.state_tree import dtype_name, tensor_bytes

_PLAIN = (bool, int, float, complex, bytes, type(None))
_ITERATORS_FROM = 3  # the index in what `__reduce_ex__` returns where the iterators of list and mapping items begin


def digest_value(value: object) -> str:
    """Return the digest of any value (xxh3-128, hex), the same in every process that holds an equal value.

    The order of a mapping or a set does not count, nor the type of a mapping, nor whether a sequence is a list or a
    tuple. Of an absolute path only the last name counts: where a run writes is not what it computed. An object
    counts by its class and by what it would be copied from; an object that cannot be copied (a lock, a file) counts
    by its class alone.
    """
    return _digest(value, ()).hex()


def _digest(value: Any, within: tuple[int, ...]) -> bytes:
    if isinstance(value, torch.Tensor):
        head = f"tensor|{dtype_name(value.dtype)}|{tuple(value.shape)}"
        return _join(head, [tensor_bytes(value).cpu().numpy().tobytes()])
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _join(f"array|{value.dtype.str}|{value.shape}", [value.tobytes()])
    for kind in _PLAIN:
        if isinstance(value, kind):
            return _join(f"{kind.__name__}|{_exact(value)}", [])
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        return _join("text", [os.path.basename(text).encode() if os.path.isabs(text) else str(text).encode()])
    if id(value) in within:
        return _join("itself", [str(len(within) - within.index(id(value))).encode()])
    return _digest_parts(value, (*within, id(value)))


def _exact(value: Any) -> str:
    """Return the text of a plain value, also for an instance of a subclass (NumPy's numbers, for instance)."""
    if isinstance(value, float):
        return value.hex()
    return int.__repr__(value) if isinstance(value, int) else repr(value)


def _digest_parts(value: Any, within: tuple[int, ...]) -> bytes:
    """Return the digest of a value, made from the digests of its parts."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, Mapping):
        pairs = (_digest(key, within) + _digest(item, within) for key, item in value.items())
        return _join("mapping", sorted(pairs))
    if isinstance(value, Set):
        return _join("set", sorted(_digest(item, within) for item in value))
    if isinstance(value, list | tuple | np.ndarray):
        return _join("sequence", [_digest(item, within) for item in value])
    if inspect.isclass(value) or inspect.isroutine(value):
        return _join("code", [str(getattr(value, "__qualname__", name)).encode()])
    try:
        made_of = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - a class may refuse to be copied with any error; then only its name is known
        return _join(f"opaque|{name}", [])
    if isinstance(made_of, str):
        return _join(f"global|{made_of}", [])
    parts = [
        list(part) if index >= _ITERATORS_FROM and part is not None else part
        for index, part in enumerate(made_of)
        if index > 0
    ]
    return _join(f"object|{name}", [_digest(part, within) for part in parts])


def _join(head: str, parts: list[bytes]) -> bytes:
    """Return the digest of a head and parts, each with its length, so that no two sequences look alike."""
    total = xxhash.xxh3_128()
    for part in (head.encode(), *parts):
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()
