"""A rank's random streams: taken, kept as bytes, and put back bit for bit.

They are taken at least twice per optimizer step, so what is slow to read is not read again while it has not moved.
A fault may interrupt that between any two instructions, so what was seen and what came of it are kept in one
assignment.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from checkpointless.agent.board import Board
from checkpointless.recovery import state_tree
from checkpointless.recovery.moment import Stage

_PYTHON = struct.Struct("<i?d")  # version, whether a second normal number is pending, and which; then the words
_NUMPY = struct.Struct("<16si?d")  # generator, position, and likewise; then the words
_MT19937_BYTES = 624 * 4 + 4  # of NumPy's mt19937_state: the words and the position
DATA_SERIES = 5  # of the board: the streams at the begin of an iterator over the training data
_AS_AFTER_THE_STEP = b""  # a snapshot of a later moment, before which nothing was drawn since the step
#: Of the board, for each moment after a step.
_SERIES = {Stage.COMMITTED: 0, Stage.ENDED: 1, Stage.CHECKED: 2, Stage.TURNED: 3, Stage.LOADED: 4}


@dataclass(frozen=True)
class RngSource:
    """A stream of a framework, beside Python's, NumPy's and torch's.

    Attributes:
        get: the state as a tree of plain data and tensors.
        set: puts such a state back.
    """

    get: Callable[[], Any]
    set: Callable[[Any], None]


def register_rng_source(name: str, source: RngSource) -> None:
    """Have ``source`` taken and restored with the others (Megatron's tracker, for example)."""
    _sources[name] = _SourceStream(source)


@dataclass(frozen=True)
class RngStates:
    """All streams of one rank at one moment.

    Attributes:
        streams: name -> state, as bytes.
        loss: the loss of the step that these streams end, where it is known.
        stage: the moment after a step; ``COMMITTED`` is right at the end of the optimizer step, before anything
            that follows it drew.
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
        """Take the state of every stream of this process."""
        streams = {"python": _python.take(), "torch": torch.get_rng_state().numpy().tobytes()}
        numpy = _numpy_random()
        if numpy is not None:
            streams["numpy"] = _numpy.take(numpy)
        if torch.cuda.is_initialized():
            streams["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
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

    def of_source(self, name: str) -> Any:
        """The state of the registered source ``name``; None if it was not taken."""
        taken = self.streams.get(f"source:{name}")
        return state_tree.loads(taken) if taken is not None else None

    def same_streams(self, other: RngStates) -> bool:
        """Whether no stream moved between the two."""
        return self.streams == other.streams

    def to_bytes(self) -> bytes:
        """As plain data: about 10 kB, with Megatron's tracker on the CPU 25 kB, and what else is the rank's own."""
        own = None if self.own is None else dict(self.own)
        return state_tree.dumps((self.streams, self.loss, int(self.stage), own))

    @classmethod
    def from_bytes(cls, data: bytes) -> RngStates:
        """What :meth:`to_bytes` made.

        Raises:
            ValueError: ``data`` is not that.
        """
        streams, loss, stage, own = state_tree.loads(data)
        return cls(streams, loss, Stage(stage), own)


def put_on_board(board: Board, step: int, states: RngStates, after_the_step: RngStates | None) -> None:
    """Keep ``states`` as those after ``step`` in memory that outlives the process.

    Args:
        board: this rank's.
        step: the optimizer step.
        states: its streams.
        after_the_step: what is there as its streams at ``COMMITTED``, if anything: often nothing is drawn after it.
    """
    unmoved = (
        states.stage is not Stage.COMMITTED and after_the_step is not None and states.same_streams(after_the_step)
    )
    if not unmoved:
        payload = states.to_bytes()
    elif states.own == {}:
        payload = _AS_AFTER_THE_STEP
    else:
        payload = dataclasses.replace(states, streams={}).to_bytes()
    if states.stage is Stage.COMMITTED:  # what followed it the last time that this step was made is void
        for stage in (Stage.ENDED, Stage.CHECKED, Stage.TURNED):
            board.drop_snapshot(step, _SERIES[stage])
    board.put_snapshot(step, payload, series=_SERIES[states.stage])


def from_board(board: Board, step: int) -> dict[Stage, RngStates]:
    """The streams after ``step`` that the board has."""
    found: dict[Stage, RngStates] = {}
    for stage, series in _SERIES.items():
        snapshot = board.snapshot(step, series)
        if snapshot is None:
            continue
        states = RngStates.from_bytes(snapshot) if snapshot != _AS_AFTER_THE_STEP else RngStates(stage=stage)
        if states.streams:
            found[stage] = states
        elif Stage.COMMITTED in found:
            committed = found[Stage.COMMITTED]
            found[stage] = dataclasses.replace(states, streams=committed.streams, loss=committed.loss)
    return found


class _PythonStream:
    """Python's own stream; its words are packed again only if it has moved."""

    def __init__(self) -> None:
        self._taken: tuple[tuple[int, ...], bytes] = ((), b"")  # the words, and as bytes

    def take(self) -> bytes:
        version, words, gauss = random.getstate()
        seen, packed = self._taken
        if words != seen:
            packed = array("I", words).tobytes()
            self._taken = (words, packed)
        return _PYTHON.pack(version, gauss is not None, gauss or 0.0) + packed

    def put_back(self, state: bytes) -> None:
        version, has_gauss, gauss = _PYTHON.unpack_from(state)
        random.setstate((version, tuple(array("I", state[_PYTHON.size :])), gauss if has_gauss else None))


class _NumpyStream:
    """NumPy's global stream. ``get_state`` is slow (60 us): the words in memory say whether it has to be asked."""

    def __init__(self) -> None:
        self._generator: tuple[Any, int] = (None, 0)  # and where its state is; 0: it is not NumPy's default kind
        self._taken = (b"", b"")  # the memory, and the state; nothing if the state may change without the memory

    def take(self, numpy_random: Any) -> bytes:
        memory = self._look(numpy_random)
        seen, state = self._taken
        if not memory or memory != seen:
            name, keys, position, has_gauss, cached = numpy_random.get_state()
            state = _NUMPY.pack(name.encode(), int(position), bool(has_gauss), float(cached)) + keys.tobytes()
            # A second normal number that is pending can be used up without a word being drawn.
            self._taken = (b"", b"") if has_gauss else (memory, state)
        return state

    def put_back(self, state: bytes, numpy_random: Any) -> None:
        name, position, has_gauss, cached = _NUMPY.unpack_from(state)
        keys = array("I", state[_NUMPY.size :])
        self._taken = (b"", b"")
        numpy_random.set_state((name.rstrip(b"\0").decode(), keys, position, int(has_gauss), cached))

    def _look(self, numpy_random: Any) -> bytes:
        """The generator's memory, and whose; nothing where it is of another kind than NumPy's default."""
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
        self._taken: tuple[tuple[Any, ...] | None, bytes] = (None, b"")  # the state, and as bytes

    def take(self) -> bytes:
        state = self._source.get()
        constant = _constant(state)
        seen, encoded = self._taken
        if constant is None or constant != seen:
            encoded = state_tree.dumps(state)
            self._taken = (constant, encoded)
        return encoded

    def put_back(self, state: Any) -> None:
        self._source.set(state)


_CONSTANTS = (bytes, int, str, type(None))  # equal ones are encoded alike, and nobody changes them


def _constant(state: Any) -> tuple[Any, ...] | None:
    """What is equal only for states that are encoded alike, and does not change with ``state``; None: unknown."""
    if type(state) is dict:
        known = all(type(key) is str and type(value) in _CONSTANTS for key, value in state.items())
        return tuple(state.items()) if known else None
    return (state,) if type(state) in _CONSTANTS else None


_python = _PythonStream()
_numpy = _NumpyStream()
_sources: dict[str, _SourceStream] = {}


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None
