"""Capture a rank's random streams, keep them as bytes, and put them back bit for bit.

The streams are captured at least twice per optimizer step, so a stream that is slow to read is not read again while
it has not moved. A fault may interrupt a capture between any two instructions, so what was seen and what was made
of it are kept in one assignment.
"""

from __future__ import annotations

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

from checkpointless.recovery.generator_memory import numpy_memory, python_memory, torch_memory
from checkpointless.recovery.moment import Stage
from checkpointless.serialization import state_tree

_PYTHON = struct.Struct("<i?d")  # version, whether a second normal number is pending, and which; then the words
_NUMPY = struct.Struct("<16si?d")  # generator, position, whether a second normal is pending, and which; then words
_HEAD = struct.Struct("<4sb?diH")  # magic, stage, whether the loss is known, and it; length of `own`; streams
_MAGIC = b"RNG1"
_ENTRY = struct.Struct("<HII")  # of a stream: the lengths of its name and its state, and the state's crc32
_NO_OWN = -1  # in the place of its length


@dataclass(frozen=True)
class RngSource:
    """A random stream of a framework, beside those of Python, NumPy and torch.

    Attributes:
        get: returns the state as a tree of plain data and tensors.
        set: puts back a state that ``get`` returned.
        look: returns a value that is never changed, and is equal to an earlier one only if the state has not moved
            in between; it is asked before ``get``. None: ``get`` is asked each time.
        generators: those of torch's generators whose states ``get`` returns, if these are all.
    """

    get: Callable[[], state_tree.Tree]
    set: Callable[[state_tree.Tree], None]
    look: Callable[[], object] | None = None
    generators: tuple[torch.Generator, ...] = ()


def register_rng_source(name: str, source: RngSource) -> None:
    """Have ``source`` captured and restored with the other streams (Megatron's tracker, for example)."""
    _streams.forget()
    _sources[name] = _SourceStream(source)
    _streams.forget()


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
        return cls(_streams.take(), loss, stage, own)

    def restore(self) -> None:
        """Put every stream back."""
        _streams.forget()
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
        return self.streams is other.streams or self.streams == other.streams

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


class _Streams:
    """All streams of this process: the same dictionary as long as none has moved."""

    def __init__(self) -> None:
        self._seen: _Seen | None = None

    def forget(self) -> None:
        """Forget what was seen: what is next may look the same and be something else."""
        self._seen = None

    def take(self) -> dict[str, bytes]:
        """Return the state of every stream, by name; nobody changes what is returned."""
        seen = self._seen
        if seen is not None and seen.is_so():
            return seen.streams
        self._seen = None
        seen, streams = _look()
        self._seen = seen
        return streams


class _Seen:
    """What was seen of all streams when they were taken.

    Args:
        streams: what was taken.
        python: Python's generator, and the second normal number that was pending.
        numpy: NumPy's function that returns its generator, and the generator; None: NumPy was not imported.
        has_cuda: whether there was a stream of CUDA's.
        memories: places in memory, each with what was there; their generators live as long as the sources do.
        looks: functions, each with what it returned.
    """

    __slots__ = ("_has_cuda", "_looks", "_memories", "_numpy", "_python", "streams")

    def __init__(
        self,
        streams: dict[str, bytes],
        python: tuple[Any, object],
        numpy: tuple[Callable[[], object], object] | None,
        has_cuda: bool,
        memories: list[tuple[Any, bytes]],
        looks: list[tuple[Callable[[], object], object]],
    ) -> None:
        self.streams = streams
        self._python, self._numpy, self._has_cuda = python, numpy, has_cuda
        self._memories, self._looks = memories, looks

    def is_so(self) -> bool:
        """Return whether all is as it was seen, so that no stream has moved."""
        generator, pending = self._python
        now: Any = getattr(random.getstate, "__self__", None)
        if now is not generator or now.gauss_next is not pending:
            return False
        if self._numpy is None:
            if "numpy" in sys.modules:
                return False
        elif self._numpy[0]() is not self._numpy[1]:
            return False
        for memory, before in self._memories:
            if not before.startswith(memory):  # it compares them in place
                return False
        for look, known in self._looks:
            if look() != known:
                return False
        return torch.cuda.is_initialized() is self._has_cuda


def _look() -> tuple[_Seen | None, dict[str, bytes]]:
    """Take all streams, and return what tells whether they have moved since; None if nothing tells it."""
    memories: list[tuple[Any, bytes]] = []
    looks: list[tuple[Callable[[], object], object]] = []
    streams = {"python": _python.take(), "torch": _torch.take()}
    memories += (_python.seen(), _torch.seen())
    numpy = _numpy_random()
    if numpy is not None:
        streams["numpy"] = _numpy.take(numpy)
        memories.append(_numpy.seen())
    has_cuda = torch.cuda.is_initialized()
    if has_cuda:
        streams["cuda"] = _cuda.take()
        looks.append((_cuda.take, streams["cuda"]))
    for name, source in _sources.items():
        more, known = source.look()
        streams[f"source:{name}"] = source.take((more, known) if known is not None else None)
        memories += more
        looks += known if known is not None else [(source.take, streams[f"source:{name}"])]
    generator, pending = _python.pending()
    if generator is None or any(memory is None for memory, _ in memories):
        return None, streams
    theirs = None if numpy is None else (numpy.get_bit_generator, numpy.get_bit_generator())
    return _Seen(streams, (generator, pending), theirs, has_cuda, memories, looks), streams


class _PythonStream:
    """Python's stream. ``getstate`` is slow (it makes 625 numbers): the words in memory tell whether to call it.

    Whether they are where they are looked for is seen each time that the state is asked for.
    """

    def __init__(self) -> None:
        self._generator: tuple[object, Any] = (None, None)  # and its memory; None: it is not known
        self._taken = (b"", b"", b"")  # the memory, what precedes the words, and the state

    def take(self) -> bytes:
        generator: Any = getattr(random.getstate, "__self__", None)
        if generator is not self._generator[0]:
            self._generator = (generator, python_memory(generator))
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

    def seen(self) -> tuple[Any, bytes]:
        """Return the generator's memory, None if it is not known, and what was there when the state was taken."""
        return self._generator[1], self._taken[0]

    def pending(self) -> tuple[Any, object]:
        """Return the generator, and the second normal number that is pending in it."""
        generator: Any = self._generator[0]
        return generator, getattr(generator, "gauss_next", None)

    def put_back(self, state: bytes) -> None:
        version, has_gauss, gauss = _PYTHON.unpack_from(state)
        random.setstate((version, tuple(array("I", state[_PYTHON.size :])), gauss if has_gauss else None))


class _TorchStream:
    """A stream of torch's; its state is the same object while it has not moved.

    Args:
        get: returns the state as torch does.
        generator: returns the generator, if it is on the host.
    """

    def __init__(self, get: Callable[[], torch.Tensor], generator: Callable[[], Any] = lambda: None) -> None:
        self._get = get
        self._generator = generator
        self._known: tuple[object, Any] = (None, None)  # the generator and its memory; None: it is not known
        self._taken = (b"", b"")  # the memory and the state

    def take(self) -> bytes:
        generator = self._generator()
        if generator is not self._known[0]:
            self._known = (generator, torch_memory(generator))
        memory = self._known[1]
        now = memory.raw if memory is not None else b""
        seen, state = self._taken
        if not now or now != seen:
            fresh = self._get().numpy().tobytes()
            state = fresh if fresh != state else state
            self._taken = (now, state)
        return state

    def seen(self) -> tuple[Any, bytes]:
        """Return the generator's memory, None if it is not known, and what was there when the state was taken."""
        return self._known[1], self._taken[0]


class _NumpyStream:
    """NumPy's global stream. ``get_state`` is slow (60 us): the words in memory tell whether to call it."""

    def __init__(self) -> None:
        self._generator: tuple[Any, Any] = (None, None)  # and its memory; None: it is not of NumPy's default kind
        # The generator, the memory, and the state; None if the state may change without the memory.
        self._taken: tuple[Any, bytes, bytes] = (None, b"", b"")

    def take(self, numpy_random: Any) -> bytes:
        memory = self._look(numpy_random)
        now = memory.raw if memory is not None else b""
        generator, seen, state = self._taken
        if not now or generator is not self._generator[0] or now != seen:
            name, keys, position, has_gauss, cached = numpy_random.get_state()
            state = _NUMPY.pack(name.encode(), int(position), bool(has_gauss), float(cached)) + keys.tobytes()
            # A pending second normal number can be used up without a word being drawn.
            self._taken = (None, b"", b"") if has_gauss else (self._generator[0], now, state)
        return state

    def seen(self) -> tuple[Any, bytes]:
        """Return the memory, None if it does not tell the state, and what was there when the state was taken."""
        generator, seen, _ = self._taken
        known = generator is not None and generator is self._generator[0]
        return self._generator[1] if known else None, seen

    def put_back(self, state: bytes, numpy_random: Any) -> None:
        name, position, has_gauss, cached = _NUMPY.unpack_from(state)
        keys = array("I", state[_NUMPY.size :])
        self._taken = (None, b"", b"")
        numpy_random.set_state((name.rstrip(b"\0").decode(), keys, position, int(has_gauss), cached))

    def _look(self, numpy_random: Any) -> Any:
        """Return the memory of the generator in use; None if it is not of NumPy's default kind."""
        generator: Any = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
        if generator is not self._generator[0]:
            self._generator = (generator, numpy_memory(generator))
        return self._generator[1]


class _SourceStream:
    """A registered source; its state is encoded again only if it has moved."""

    def __init__(self, source: RngSource) -> None:
        self._source = source
        self._memories = [(each, torch_memory(each)) for each in source.generators]
        # What was seen before the state was taken, the state, and its bytes.
        self._taken: tuple[object, tuple[Any, ...] | None, bytes] = (None, None, b"")

    def look(self) -> tuple[list[tuple[Any, bytes]], list[tuple[Callable[[], object], object]] | None]:
        """Return what is in the source's memories and what its functions return; None: that says nothing."""
        memories = [memory for _, memory in self._memories if memory is not None]
        if memories and len(memories) == len(self._memories):
            return [(memory, memory.raw) for memory in memories], []
        look = self._source.look
        return [], None if look is None else [(look, look())]

    def take(self, looked: object = None) -> bytes:
        """Return the encoded state.

        Args:
            looked: what :meth:`look` has just returned, if that says whether the state has moved.
        """
        before, seen, encoded = self._taken
        if looked is not None and looked == before:
            return encoded
        state = self._source.get()
        constant = _constant(state)
        if constant is None or constant != seen:
            encoded = state_tree.dumps(state)
        self._taken = (looked, constant, encoded)
        return encoded

    def put_back(self, state: state_tree.Tree) -> None:
        self._taken = (None, None, b"")
        self._source.set(state)


_CONSTANTS = (bytes, int, str, type(None))  # equal values are encoded alike, and none can change


def _constant(state: state_tree.Tree) -> tuple[Any, ...] | None:
    """Return an immutable value that is equal only for states that are encoded alike; None if there is none."""
    if type(state) is dict:
        known = all(type(key) is str and type(value) in _CONSTANTS for key, value in state.items())
        return tuple(state.items()) if known else None
    return (state,) if type(state) in _CONSTANTS else None


_python = _PythonStream()
_torch = _TorchStream(lambda: torch.get_rng_state(), lambda: torch.default_generator)
_cuda = _TorchStream(lambda: torch.cuda.get_rng_state())
_numpy = _NumpyStream()
_streams = _Streams()
_sources: dict[str, _SourceStream] = {}


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None
