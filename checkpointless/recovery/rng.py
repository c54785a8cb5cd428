"""A rank's random streams: taken, kept as bytes, and put back bit for bit.

They are taken twice per optimizer step, so what is slow to read is not read again while it has not moved.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointless.agent.board import Board
from checkpointless.recovery import state_tree

_MT19937_BYTES = 624 * 4 + 4  # of NumPy's mt19937_state: the words and the position
_AS_AFTER_THE_STEP = b""  # a snapshot at the start of a batch, before which nothing was drawn since the step


@dataclass(frozen=True)
class RngSource:
    """A stream of a framework, beside Python's, NumPy's and torch's.

    Attributes:
        get: the state as a tree of plain data and tensors.
        set: puts such a state back.
    """

    get: Callable[[], Any]
    set: Callable[[Any], None]


_sources: dict[str, RngSource] = {}


def register_rng_source(name: str, source: RngSource) -> None:
    """Have ``source`` taken and restored with the others (Megatron's tracker, for example)."""
    _sources[name] = source


@dataclass(frozen=True)
class RngStates:
    """All streams of one rank at one moment.

    Attributes:
        streams: name -> state, a tree of plain data and uint8 tensors.
        loss: the loss of the step that these streams end, where it is known.
        at_batch_start: taken when the next batch was in hand, just before its training step; else right at the end
            of the optimizer step, before validation or the next batch drew anything.
    """

    streams: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None
    at_batch_start: bool = False

    @classmethod
    def capture(cls, loss: float | None = None, at_batch_start: bool = False) -> RngStates:
        """Take the state of every stream of this process."""
        streams: dict[str, Any] = {"python": _python.take(), "torch": torch.get_rng_state()}
        numpy = _numpy_random()
        if numpy is not None:
            streams["numpy"] = _numpy.take(numpy)
        if torch.cuda.is_initialized():
            streams["cuda"] = torch.cuda.get_rng_state()
        for name, source in _sources.items():
            streams[f"source:{name}"] = source.get()
        return cls(streams, loss, at_batch_start)

    def restore(self) -> None:
        """Put every stream back."""
        version, words, gauss = self.streams["python"]
        random.setstate((version, tuple(array("I", words)), gauss))
        torch.set_rng_state(self.streams["torch"])
        numpy = _numpy_random()
        if numpy is not None and "numpy" in self.streams:
            name, keys, position, has_gauss, cached = self.streams["numpy"]
            words = array("I", keys)
            numpy.set_state((name, words, position, has_gauss, cached))
        if "cuda" in self.streams:
            torch.cuda.set_rng_state(self.streams["cuda"])
        for name, source in _sources.items():
            if f"source:{name}" in self.streams:
                source.set(self.streams[f"source:{name}"])

    def same_streams(self, other: RngStates) -> bool:
        """Whether no stream moved between the two."""
        return _equal(self.streams, other.streams)

    def to_bytes(self) -> bytes:
        """As plain data (about 10 kB, with Megatron's tracker on the CPU 25 kB)."""
        return state_tree.dumps(vars(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> RngStates:
        """What :meth:`to_bytes` made.

        Raises:
            ValueError: ``data`` is not that.
        """
        return cls(**state_tree.loads(data))


def put_on_board(board: Board, step: int, states: RngStates, after_the_step: RngStates | None) -> None:
    """Keep ``states`` as those after ``step`` in memory that outlives the process.

    Args:
        board: this rank's.
        step: the optimizer step.
        states: its streams.
        after_the_step: where ``states`` are those of the next batch's start: what was kept before for this step.
    """
    unmoved = states.at_batch_start and after_the_step is not None and states.same_streams(after_the_step)
    payload = _AS_AFTER_THE_STEP if unmoved else states.to_bytes()
    board.put_snapshot(step, payload, series=int(states.at_batch_start))


def from_board(board: Board, step: int) -> RngStates | None:
    """The streams after ``step``, if the board has them: those of the next batch's start if it came so far."""
    at_batch_start, after_the_step = board.snapshot(step, series=1), board.snapshot(step, series=0)
    if at_batch_start == _AS_AFTER_THE_STEP:
        if after_the_step is None:
            return None
        states = RngStates.from_bytes(after_the_step)
        return RngStates(states.streams, states.loss, at_batch_start=True)
    newest = at_batch_start or after_the_step
    return RngStates.from_bytes(newest) if newest else None


class _PythonStream:
    """Python's own stream; its words are packed again only if it has moved."""

    def __init__(self) -> None:
        self._words: tuple[int, ...] = ()
        self._packed = b""

    def take(self) -> tuple[Any, ...]:
        version, words, gauss = random.getstate()
        if words != self._words:
            self._words, self._packed = words, array("I", words).tobytes()
        return version, self._packed, gauss


class _NumpyStream:
    """NumPy's global stream. ``get_state`` is slow (60 us): the words in memory say whether it has to be asked."""

    def __init__(self) -> None:
        self._seen = b""
        self._state: tuple[Any, ...] = ()

    def take(self, numpy_random: Any) -> tuple[Any, ...]:
        seen = self._look(numpy_random)
        # A second normal number that is pending can be used up without a word being drawn.
        if not seen or seen != self._seen or self._state[3]:
            name, keys, position, has_gauss, cached = numpy_random.get_state()
            self._state = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
            self._seen = seen
        return self._state

    @staticmethod
    def _look(numpy_random: Any) -> bytes:
        """The generator's memory, and whose; nothing where it is of another kind than NumPy's default."""
        generator: Any = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
        if type(generator).__name__ != "MT19937":
            return b""
        address = int(generator.ctypes.state_address)
        return address.to_bytes(8, "little") + ctypes.string_at(address, _MT19937_BYTES)


_python = _PythonStream()
_numpy = _NumpyStream()


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees of plain data and tensors are the same."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None
