"""A nested state as bytes and tensors: what comes back is what was sent, type for type, or it is refused.

Keys survive as they are (integers, tuples, anything hashable that is plain), and what is shared inside the state
stays shared. An object that is not plain is refused with its path. Nothing is evaluated, imported or unpickled.

The format is the length of a JSON header (4 bytes, little-endian), the header, and then the raw bytes of the byte
strings, small tensors and small arrays that it refers to, one after the other. Large tensors and arrays are kept
separately (:func:`split`), so that they can be moved in buckets.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from checkpointless.serialization.plain_values import Refused, Tree, register_plain_type
from checkpointless.serialization.tensor_memory import dtype_name, dtype_of, tensor_bytes
from checkpointless.serialization.tree_copy import copy
from checkpointless.serialization.tree_decoder import Blobs, Decoder
from checkpointless.serialization.tree_encoder import Checker, Digester, Encoder, Sender, Sink, canonical_digest

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json

__all__ = [
    "INLINE_BYTES",
    "MAX_BYTES",
    "StateTreeError",
    "Tree",
    "check",
    "copy",
    "digest",
    "dtype_name",
    "dtype_of",
    "dumps",
    "join",
    "loads",
    "register_plain_type",
    "split",
    "tensor_bytes",
]

INLINE_BYTES = 4096  # a tensor up to this size is copied into the skeleton: a separate message takes longer
MAX_BYTES = 2 * 1024 * 1024 * 1024  # limit of everything but large tensors and arrays

_LENGTH = struct.Struct("<I")
# The exceptions that a damaged or forged tree may raise while it is decoded.
_UNREADABLE = (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError, RuntimeError)


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
    sender = Sender(None)
    return _packed(_encode(tree, sender), sender)


def loads(data: bytes) -> Tree:
    """Decode what :func:`dumps` made.

    Raises:
        ValueError: ``data`` was not made by :func:`dumps`.
    """
    return join(data, ())


def split(tree: Tree, inline_bytes: int = INLINE_BYTES) -> tuple[bytes, list[torch.Tensor]]:
    """Encode ``tree`` without its large tensors and arrays.

    Args:
        tree: a state of the types that :func:`dumps` allows.
        inline_bytes: the size in bytes up to which a tensor or array is encoded with the rest.

    Returns:
        The encoded rest, and the tensors. Each tensor shares the memory of the original if that has no gaps.

    Raises:
        StateTreeError: something in ``tree`` cannot travel.
    """
    sender = Sender(inline_bytes)
    return _packed(_encode(tree, sender), sender), sender.tensors


def join(skeleton: bytes, tensors: Sequence[torch.Tensor]) -> Tree:
    """Put together what :func:`split` took apart. The state uses ``tensors`` themselves.

    Raises:
        ValueError: ``skeleton`` is damaged, or belongs to other tensors.
    """
    if len(skeleton) < _LENGTH.size:
        raise ValueError("a state tree is cut off")
    view = memoryview(skeleton)
    (length,) = _LENGTH.unpack_from(view)
    blobs = Blobs(view[_LENGTH.size + length :])
    try:
        tree = Decoder(blobs, tensors).decode(json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length])))
    except _UNREADABLE as error:
        raise ValueError(f"a state tree cannot be read: {type(error).__name__}: {error}") from error
    blobs.end()
    return tree


def check(tree: object) -> None:
    """Check in advance that ``tree`` can travel. No tensor is read or copied.

    Args:
        tree: any state.

    Raises:
        StateTreeError: ``tree`` cannot travel; the message is one line with the path, the type and what to do.
    """
    checker = Checker(INLINE_BYTES)
    _encode(tree, checker)
    _bounded(checker.nbytes)


def digest(tree: Tree) -> str:
    """Return a digest of ``tree``, 32 hexadecimal digits, that is equal in every process where the state is equal.

    The order of dictionaries (except OrderedDict) and sets does not matter, nor does the memory layout of a tensor
    or what is shared. Types, dtypes and kinds of devices do.

    Raises:
        StateTreeError: something in ``tree`` cannot travel.
    """
    return canonical_digest(_encode(tree, Digester()))


def _encode(tree: Tree, sink: Sink) -> Json:
    try:
        return Encoder(sink).encode(tree)
    except Refused as refused:
        raise StateTreeError(str(refused)) from None
    except RecursionError:
        raise StateTreeError("state is nested too deep for the stack: keep a flatter state") from None


def _packed(encoded: Json, sender: Sender) -> bytes:
    header = json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()
    _bounded(len(header) + sum(map(len, sender.blobs)))
    return b"".join([_LENGTH.pack(len(header)), header, *sender.blobs])


def _bounded(nbytes: int) -> None:
    if nbytes > MAX_BYTES:
        raise StateTreeError(f"state has {nbytes} bytes outside of tensors, over {MAX_BYTES}: keep them in tensors")
