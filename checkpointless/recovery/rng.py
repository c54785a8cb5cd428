"""Capture a rank's random streams, keep them as bytes, and put them back bit for bit.

The streams are captured at least twice per optimizer step, so a stream that is slow to read is not read again while
it has not moved. A fault may interrupt a capture between any two instructions, so what was seen and what was made
of it are kept in one assignment.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from checkpointless.recovery.moment import Stage
from checkpointless.serialization import state_tree
from checkpointless.wire.board import Board

_PYTHON = struct.Struct("<i?d")  # version, whether a second normal number is pending, and which; then the words
_NUMPY = struct.Struct("<16si?d")  # generator, position, whether a second normal is pending, and which; then words
_MT19937_BYTES = 624 * 4 + 4  # of NumPy's mt19937_state: the words and the position; of Python's: the reverse
_HEAD = struct.Struct("<4sb?diH")  # magic, stage, whether the loss is known, and it; length of `own`; streams
_MAGIC = b"RNG1"
_ENTRY = struct.Struct("<HII")  # of a stream: the lengths of its name and its state, and the state's crc32
_NO_OWN = -1  # in the place of its length
DATA_SERIES = 5  # the board's series for the streams at the start of an iterator over the training data
_AS_AFTER_THE_STEP = b""  # the snapshot of a later moment, if nothing was drawn between the step and that moment
#: The board's series for each moment after a step.
_SERIES = {
    Stage.COMMITTED: 0,
    Stage.ENDED: 1,
    Stage.CHECKED: 2,
    Stage.TURNED: 3,
    Stage.LOADED: 4,
    Stage.ACCUMULATED: 7,
}


@dataclass(frozen=True)
class RngSource:
    """A random stream of a framework, beside those of Python, NumPy and torch.

    Attributes:
        get: returns the state as a tree of plain data and tensors.
        set: puts back a state that ``get`` returned.
    """

    get: Callable[[], state_tree.Tree]
    set: Callable[[state_tree.Tree], None]


def register_rng_source(name: str, source: RngSource) -> None:
    """Have ``source`` captured and restored with the other streams (Megatron's tracker, for example)."""
    _sources[name] = _SourceStream(source)


@dataclass(frozen=True)
class RngStates:
    """All random streams of one rank at one moment.

    Attributes:
        streams: the state of each stream as bytes, by the stream's name.
        loss: the loss of the step after which the streams were captured, if it is known.
        stage: the moment after the step; ``COMMITTED`` is right at the end of the optimizer step, before anything
            that follows it has drawn random numbers.
        own: what else this rank alone has at that moment, as plain data; None: it is too large to be kept here.
    """

    streams: dict[str, bytes] = field(default_factory=dict)
    loss: float | None = None
    stage: Stage = Stage.COMMITTED
    own: Mapping[str, Any] | None = field(default_factory=dict)

    @classmethod
    def capture(
        cls,
        loss: float | None = None,
        stage: Stage = Stage.COMMITTED,
        own: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> RngStates:
        """Capture the state of every stream of this process."""
        streams = {"python": _python.take(), "torch": _torch.take()}
        numpy = _numpy_random()
        if numpy is not None:
            streams["numpy"] = _numpy.take(numpy)
        if torch.cuda.is_initialized():
            streams["cuda"] = _cuda.take()
        for name, source in _sources.items():
            streams[f"source:{name}"] = source.take()
        return cls(streams, loss, stage, own)

    def restore(self) -> None:
        """Put every stream back."""
        _python.put_back(self.streams["python"])
        torch.set_rng_state(_tensor(self.streams["torch"]))
        numpy = _numpy_random()
        if numpy is not None and "numpy" in self.streams:
            _numpy.put_back(self.streams["numpy"], numpy)
        if "cuda" in self.streams:
            torch.cuda.set_rng_state(_tensor(self.streams["cuda"]))
        for name, source in _sources.items():
            if f"source:{name}" in self.streams:
                source.put_back(self.of_source(name))

    def of_source(self, name: str) -> state_tree.Tree:
        """Return the state of the registered source ``name``; None if it was not captured."""
        taken = self.streams.get(f"source:{name}")
        return state_tree.loads(taken) if taken is not None else None

    def without_sources(self) -> RngStates:
        """Return the streams of Python, NumPy and torch alone."""
        own = {name: state for name, state in self.streams.items() if not name.startswith("source:")}
        return dataclasses.replace(self, streams=own)

    def same_streams(self, other: RngStates) -> bool:
        """Return whether no stream moved between the two captures."""
        return self.streams == other.streams

    def to_bytes(self) -> bytes:
        """Encode as plain data: about 10 kB, with Megatron's tracker on the CPU 25 kB, and in addition ``own``."""
        head, parts = self.to_parts()
        return b"".join([head, *parts])

    def to_parts(self) -> tuple[bytes, list[bytes]]:
        """Return what :meth:`to_bytes` does, in parts: a head with the checksum of each stream, and the streams."""
        own = b"" if not self.own else state_tree.dumps(dict(self.own))
        length = _NO_OWN if self.own is None else len(own)
        loss = self.loss
        head = [
            _HEAD.pack(
                _MAGIC, self.stage, loss is not None, 0.0 if loss is None else loss, length, len(self.streams)
            ),
            own,
        ]
        for name, state in self.streams.items():
            head += (_ENTRY.pack(len(name), len(state), _checksum(name, state)), name.encode())
        return b"".join(head), list(self.streams.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> RngStates:
        """Decode what :meth:`to_bytes` made.

        Raises:
            ValueError: ``data`` was not made by :meth:`to_bytes`, or is damaged.
        """
        try:
            magic, stage, has_loss, loss, length, count = _HEAD.unpack_from(data)
            if magic != _MAGIC:
                raise ValueError("these are no random streams")
            place = _HEAD.size + max(length, 0)
            own = None if length == _NO_OWN else state_tree.loads(data[_HEAD.size : place]) if length else {}
            entries = []
            for _ in range(count):
                name_length, size, crc = _ENTRY.unpack_from(data, place)
                place += _ENTRY.size + name_length
                entries.append((data[place - name_length : place].decode(), size, crc))
        except struct.error as error:
            raise ValueError(f"the random streams are cut off: {error}") from error
        streams = {}
        for name, size, crc in entries:
            streams[name] = data[place : place + size]
            place += size
            if len(streams[name]) != size or zlib.crc32(streams[name]) != crc:
                raise ValueError(f"the random stream {name} is damaged")
        return cls(streams, loss if has_loss else None, Stage(stage), own)


_checksums: dict[str, tuple[bytes, int]] = {}  # by stream: the state that was looked at last, and its checksum


def _checksum(name: str, state: bytes) -> int:
    """Return the checksum of a stream's state; that of the same object is known."""
    known = _checksums.get(name)
    if known is None or known[0] is not state:
        known = _checksums[name] = (state, zlib.crc32(state))
    return known[1]


def put_on_board(board: Board, step: int, states: RngStates, after_the_step: RngStates | None) -> None:
    """Keep ``states`` as the streams after ``step`` in memory that outlives the process.

    Args:
        board: this rank's board.
        step: the optimizer step.
        states: the streams after that step.
        after_the_step: the streams that are kept for that step at ``COMMITTED``, if any: often nothing is drawn
            between ``COMMITTED`` and later moments.
    """
    unmoved = (
        states.stage is not Stage.COMMITTED and after_the_step is not None and states.same_streams(after_the_step)
    )
    if states.stage is Stage.COMMITTED:  # what followed when this step was made before is void
        for stage in (Stage.ENDED, Stage.CHECKED, Stage.TURNED, Stage.ACCUMULATED):
            board.drop_snapshot(step, _SERIES[stage])
    series = _SERIES[states.stage]
    if not unmoved:
        board.put_parts(step, *states.to_parts(), series)
    elif states.own == {}:
        board.put_snapshot(step, _AS_AFTER_THE_STEP, series)
    else:
        board.put_snapshot(step, dataclasses.replace(states, streams={}).to_bytes(), series)


def from_board(board: Board, step: int) -> dict[Stage, RngStates]:
    """Return the streams after ``step`` that the board has."""
    found: dict[Stage, RngStates] = {}
    for stage, series in _SERIES.items():
        snapshot = board.snapshot(step, series)
        if snapshot is None:
            continue
        try:
            states = RngStates.from_bytes(snapshot) if snapshot != _AS_AFTER_THE_STEP else RngStates(stage=stage)
        except ValueError:  # the process ended while it wrote them
            continue
        if states.streams:
            found[stage] = states
        elif Stage.COMMITTED in found:
            committed = found[Stage.COMMITTED]
            found[stage] = dataclasses.replace(states, streams=committed.streams, loss=committed.loss)
    return found


class _PythonStream:
    """Python's stream. ``getstate`` is slow (it makes 625 numbers): the words in memory tell whether to call it.

    CPython's generator has a position and 624 words behind the head of its object (``RandomObject`` of
    ``_randommodule.c``). Whether that is so is seen each time that the state is asked for.
    """

    def __init__(self) -> None:
        self._generator: tuple[object, Any] = (None, None)  # and its memory; None: it is not known
        self._taken = (b"", b"", b"")  # the memory, what precedes the words, and the state

    def take(self) -> bytes:
        generator: Any = getattr(random.getstate, "__self__", None)
        if generator is not self._generator[0]:
            self._generator = (generator, _memory_of(generator))
        memory = self._generator[1]
        now = memory.raw if memory is not None else b""
        seen, head, state = self._taken
        if now and now == seen:
            gauss = generator.gauss_next
            if _PYTHON.pack(generator.VERSION, gauss is not None, 0.0 if gauss is None else gauss) == head:
                return state
        version, words, gauss = random.getstate()
        head, packed = (
            _PYTHON.pack(version, gauss is not None, 0.0 if gauss is None else gauss),
            array("I", words).tobytes(),
        )
        if now and now[4:] + now[:4] != packed:  # it is something else that is there
            self._generator, now = (generator, None), b""
        state = head + packed
        self._taken = (now, head, state if state != self._taken[2] else self._taken[2])
        return self._taken[2]

    def put_back(self, state: bytes) -> None:
        version, has_gauss, gauss = _PYTHON.unpack_from(state)
        random.setstate((version, tuple(array("I", state[_PYTHON.size :])), gauss if has_gauss else None))


def _memory_of(generator: object) -> Any:
    """Return the memory of Python's generator; None if it is another kind of generator."""
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    return (ctypes.c_char * _MT19937_BYTES).from_address(id(generator) + object.__basicsize__)


class _TorchStream:
    """A stream of torch's; its state is the same object while it has not moved.

    Args:
        get: returns the state as torch does.
    """

    def __init__(self, get: Callable[[], torch.Tensor]) -> None:
        self._get = get
        self._taken = b""

    def take(self) -> bytes:
        state = self._get().numpy().tobytes()
        if state != self._taken:
            self._taken = state
        return self._taken


class _NumpyStream:
    """NumPy's global stream. ``get_state`` is slow (60 us): the words in memory tell whether to call it."""

    def __init__(self) -> None:
        self._generator: tuple[Any, int] = (None, 0)  # and its state's address; 0: not of NumPy's default kind
        self._taken = (b"", b"")  # the memory, and the state; empty if the state may change without the memory

    def take(self, numpy_random: Any) -> bytes:
        memory = self._look(numpy_random)
        seen, state = self._taken
        if not memory or memory != seen:
            name, keys, position, has_gauss, cached = numpy_random.get_state()
            state = _NUMPY.pack(name.encode(), int(position), bool(has_gauss), float(cached)) + keys.tobytes()
            # A pending second normal number can be used up without a word being drawn.
            self._taken = (b"", b"") if has_gauss else (memory, state)
        return state

    def put_back(self, state: bytes, numpy_random: Any) -> None:
        name, position, has_gauss, cached = _NUMPY.unpack_from(state)
        keys = array("I", state[_NUMPY.size :])
        self._taken = (b"", b"")
        numpy_random.set_state((name.rstrip(b"\0").decode(), keys, position, int(has_gauss), cached))

    def _look(self, numpy_random: Any) -> bytes:
        """Return the generator's address and memory; empty if the generator is not of NumPy's default kind."""
        generator: Any = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
        known, address = self._generator
        if generator is not known:
            address = int(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else 0
            self._generator = (generator, address)
        if not address:
            return b""
        return address.to_bytes(8, "little") + ctypes.string_at(address, _MT19937_BYTES)


class _SourceStream:
    """A registered source; its state is encoded again only if it has moved."""

    def __init__(self, source: RngSource) -> None:
        self._source = source
        self._taken: tuple[tuple[Any, ...] | None, bytes] = (None, b"")  # the state, and its bytes

    def take(self) -> bytes:
        state = self._source.get()
        constant = _constant(state)
        seen, encoded = self._taken
        if constant is None or constant != seen:
            encoded = state_tree.dumps(state)
            self._taken = (constant, encoded)
        return encoded

    def put_back(self, state: state_tree.Tree) -> None:
        self._source.set(state)


_CONSTANTS = (bytes, int, str, type(None))  # equal values are encoded alike, and none can change


def _constant(state: state_tree.Tree) -> tuple[Any, ...] | None:
    """Return an immutable value that is equal only for states that are encoded alike; None if there is none."""
    if type(state) is dict:
        known = all(type(key) is str and type(value) in _CONSTANTS for key, value in state.items())
        return tuple(state.items()) if known else None
    return (state,) if type(state) in _CONSTANTS else None


_python = _PythonStream()
_torch = _TorchStream(lambda: torch.get_rng_state())
_cuda = _TorchStream(lambda: torch.cuda.get_rng_state())
_numpy = _NumpyStream()
_sources: dict[str, _SourceStream] = {}


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None
