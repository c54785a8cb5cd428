"""A rank's random streams: taken, kept as bytes, and put back bit for bit."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointless.recovery import state_tree


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
        version, words, gauss = random.getstate()
        streams: dict[str, Any] = {
            "python": (version, array("I", words).tobytes(), gauss),
            "torch": torch.get_rng_state(),
        }
        numpy = _numpy_random()
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.get_state()
            streams["numpy"] = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
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

    def to_bytes(self) -> bytes:
        """As plain data (about 20 kB)."""
        return state_tree.dumps(vars(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> RngStates:
        """What :meth:`to_bytes` made.

        Raises:
            ValueError: ``data`` is not that.
        """
        return cls(**state_tree.loads(data))


def _numpy_random() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None
