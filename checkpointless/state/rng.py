"""Capture a rank's random streams, keep them as bytes, and put them back bit for bit.

A stream that has not moved keeps the same bytes object, by which the board knows that it has it already. A fault
may interrupt a capture between any two instructions, so what was taken is kept in one assignment.
"""

from __future__ import annotations

import dataclasses
import random
import struct
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
import numpy
import torch

from checkpointless.state.port import SnapshotPoint
from checkpointless.state.serialization import state_tree

_PYTHON = struct.Struct("<i?d")  # version, whether a second normal number is pending, and which; then the words
_NUMPY = struct.Struct("<16si?d")  # generator, position, whether a second normal is pending, and which; then words
_LENGTH = struct.Struct("<I")  # of the head, which follows


class _Head(msgspec.Struct, array_like=True):
    """What precedes the streams as bytes; of each it has the name, the length and the crc32."""

    stage: int
    loss: float | None
    own: bytes | None
    streams: list[tuple[str, int, int]]


def register_rng_source(
    name: str, take: Callable[[], state_tree.Tree], put: Callable[[state_tree.Tree], object]
) -> None:
    """Have a framework's random stream (Megatron's tracker, say) taken as plain data and put back as others."""
    _sources[name] = _Source(take, put)


@dataclass(frozen=True)
class RngStates:
    """All random streams of one rank at one point; ``own`` None: what else the rank has is too large."""

    streams: dict[str, bytes] = field(default_factory=dict)
    loss: float | None = None
    stage: SnapshotPoint = SnapshotPoint.COMMITTED
    own: Mapping[str, Any] | None = field(default_factory=dict)

    @classmethod
    def capture(
        cls,
        loss: float | None = None,
        stage: SnapshotPoint = SnapshotPoint.COMMITTED,
        own: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> RngStates:
        """Capture the state of every stream of this process."""
        return cls(_take_streams(), loss, stage, own)

    def restore(self) -> None:
        """Put every stream back."""
        _set_python_state(self.streams["python"])
        torch.set_rng_state(_tensor(self.streams["torch"]))
        _set_numpy_state(self.streams["numpy"])
        if "cuda" in self.streams:
            torch.cuda.set_rng_state(_tensor(self.streams["cuda"]))
        for name, source in _sources.items():
            if f"source:{name}" in self.streams:
                source.put(self.of_source(name))

    def of_source(self, name: str) -> state_tree.Tree:
        """Return the state of the registered source ``name``; None if it was not captured."""
        taken = self.streams.get(f"source:{name}")
        return state_tree.loads(taken) if taken is not None else None

    def without_sources(self) -> RngStates:
        """Return the streams of Python, NumPy and torch alone."""
        own = {name: state for name, state in self.streams.items() if not name.startswith("source:")}
        return dataclasses.replace(self, streams=own)

    def to_bytes(self) -> bytes:
        """Encode as plain data: about 10 kB, with Megatron's tracker on the CPU 25 kB, and in addition ``own``."""
        head, parts = self.to_parts()
        return b"".join([head, *parts])

    def to_parts(self) -> tuple[bytes, list[bytes]]:
        """Return what :meth:`to_bytes` does, in parts: a head with the checksum of each stream, and the streams."""
        own = None if self.own is None else state_tree.dumps(dict(self.own)) if self.own else b""
        entries = [(name, len(state), _checksum(name, state)) for name, state in self.streams.items()]
        loss = None if self.loss is None else float(self.loss)  # NumPy's numbers and tensors are taken, too
        head = msgspec.msgpack.encode(_Head(self.stage, loss, own, entries))
        return _LENGTH.pack(len(head)) + head, list(self.streams.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> RngStates:
        """Decode what :meth:`to_bytes` made; raise ``ValueError`` if it was not, or is damaged."""
        try:
            (length,) = _LENGTH.unpack_from(data)
            place = _LENGTH.size + length
            head = msgspec.msgpack.decode(data[_LENGTH.size : place], type=_Head)
        except (struct.error, msgspec.DecodeError) as error:
            raise ValueError(f"the random streams cannot be read: {error}") from error
        streams = {}
        for name, size, crc in head.streams:
            streams[name] = data[place : place + size]
            place += size
            if len(streams[name]) != size or zlib.crc32(streams[name]) != crc:
                raise ValueError(f"the random stream {name} is damaged")
        own = None if head.own is None else state_tree.loads(head.own) if head.own else {}
        return cls(streams, head.loss, SnapshotPoint(head.stage), own)


_checksums: dict[str, tuple[bytes, int]] = {}  # by stream: the state that was looked at last, and its checksum


def _checksum(name: str, state: bytes) -> int:
    """Return the checksum of a stream's state; that of the same object is known."""
    known = _checksums.get(name)
    if known is None or known[0] is not state:
        known = _checksums[name] = (state, zlib.crc32(state))
    return known[1]


_taken: dict[str, bytes] = {}  # what was taken last


def _take_streams() -> dict[str, bytes]:
    """Return the state of every stream; the same objects as before where none has moved. Nobody changes them."""
    global _taken
    before, states = _taken, {"python": _python_state(), "torch": torch.get_rng_state().numpy().tobytes()}
    states["numpy"] = _numpy_state()
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    for name, source in _sources.items():
        states[f"source:{name}"] = source.encoded()
    if states == before:
        return before
    _taken = {name: before[name] if before.get(name) == state else state for name, state in states.items()}
    return _taken


def _python_state() -> bytes:
    version, words, gauss = random.getstate()
    return _PYTHON.pack(version, gauss is not None, 0.0 if gauss is None else gauss) + array("I", words).tobytes()


def _set_python_state(state: bytes) -> None:
    version, has_gauss, gauss = _PYTHON.unpack_from(state)
    random.setstate((version, tuple(array("I", state[_PYTHON.size :])), gauss if has_gauss else None))


def _numpy_state() -> bytes:
    state: Any = numpy.random.get_state(legacy=False)
    words = state["state"]
    name, has_gauss = state["bit_generator"].encode(), bool(state["has_gauss"])
    return _NUMPY.pack(name, int(words["pos"]), has_gauss, float(state["gauss"])) + words["key"].tobytes()


def _set_numpy_state(state: bytes) -> None:
    name, position, has_gauss, cached = _NUMPY.unpack_from(state)
    keys: Any = array("I", state[_NUMPY.size :])  # Any: numpy takes any sequence of numbers
    numpy.random.set_state((name.rstrip(b"\0").decode(), keys, position, int(has_gauss), cached))


@dataclass
class _Source:
    """A registered source; its state is encoded again only if it has moved."""

    take: Callable[[], state_tree.Tree]
    put: Callable[[state_tree.Tree], object]
    taken: tuple[tuple[Any, ...] | None, bytes] = (None, b"")  # the state and its bytes

    def encoded(self) -> bytes:
        seen, encoded = self.taken
        state = self.take()
        constant = _constant(state)
        if constant is None or constant != seen:
            encoded = state_tree.dumps(state)
            self.taken = (constant, encoded)
        return encoded


_CONSTANTS = (bytes, int, str, type(None))  # equal values are encoded alike, and none can change


def _constant(state: state_tree.Tree) -> tuple[Any, ...] | None:
    """Return an immutable value that is equal only for states that are encoded alike; None if there is none."""
    if type(state) is dict:
        known = all(type(key) is str and type(value) in _CONSTANTS for key, value in state.items())
        return tuple(state.items()) if known else None
    return (state,) if type(state) in _CONSTANTS else None


_sources: dict[str, _Source] = {}


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
