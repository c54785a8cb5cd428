"""Copies between the memory of the host and a device, through pinned memory that is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

PINNED_BYTES = 16 * 1024 * 1024
_BUFFERS = 2


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Record everything that was launched so far."""

    def synchronize(self) -> None:
        """Wait until what was recorded is done, without the interpreter lock."""


class _Pinned:
    """A buffer, and what the host has to wait for, and then to do, before it is used again."""

    def __init__(self, memory: torch.Tensor, event: Event) -> None:
        self.memory, self._event = memory, event
        self._is_used = False
        self._target: torch.Tensor | None = None

    def launched(self, target: torch.Tensor | None = None) -> None:
        """Note that the device uses it until what was launched is done; then ``target`` takes what it has."""
        self._event.record()
        self._is_used, self._target = True, target

    def settle(self) -> None:
        """Wait for the device, and give the bytes to their target."""
        if self._is_used:
            self._event.synchronize()
        if self._target is not None:
            self._target.copy_(self.memory[: self._target.numel()])
        self._is_used, self._target = False, None


class PinnedCopies:
    """Copies bytes through two pinned buffers in turn: the host uses one while the device uses the other.

    Args:
        nbytes: the size of each buffer.
        allocate: makes a buffer; default: pinned memory.
        make_event: makes an event; default: of CUDA's.
        copy: launches a copy from the second of two tensors to the first.
    """

    def __init__(
        self,
        nbytes: int = PINNED_BYTES,
        allocate: Callable[[int], torch.Tensor] | None = None,
        make_event: Callable[[], Event] | None = None,
        copy: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    ) -> None:
        self._nbytes = nbytes
        self._allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True))
        self._make_event = make_event or (lambda: torch.cuda.Event(blocking=True))
        self._copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
        self._buffers: deque[_Pinned] = deque()

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of ``source``, on the host, to ``target``, both flat uint8; ``source`` may then change."""
        for start, pinned in self._pieces(source.numel()):
            piece = source[start : start + self._nbytes]
            pinned.memory[: piece.numel()].copy_(piece)
            self._copy(target[start : start + piece.numel()], pinned.memory[: piece.numel()])
            pinned.launched()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy of ``source`` to ``target``, on the host, both flat uint8.

        It is there after :meth:`settle`.
        """
        for start, pinned in self._pieces(source.numel()):
            piece = source[start : start + self._nbytes]
            self._copy(pinned.memory[: piece.numel()], piece)
            pinned.launched(target[start : start + piece.numel()])

    def settle(self) -> None:
        """Wait for all copies, those to the host in the order of their launch."""
        for pinned in self._buffers:
            pinned.settle()

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, _Pinned]]:
        for start in range(0, nbytes, self._nbytes):
            if len(self._buffers) < _BUFFERS:
                self._buffers.append(_Pinned(self._allocate(self._nbytes), self._make_event()))
            else:
                self._buffers.rotate(-1)  # the oldest one comes last
                self._buffers[-1].settle()
            yield start, self._buffers[-1]
