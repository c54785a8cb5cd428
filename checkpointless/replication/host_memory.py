"""Host memory that is used for part after part: new memory is slow when it is first written to."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from checkpointless.replication.parts import Content

logger = logging.getLogger(__name__)

_ALIGNMENT = 256  # bytes; enough for each dtype, and for copies at full speed
_WASTE = 2  # a piece is used again for parts of at least this fraction of its size


class HostMemoryPool:
    """Pieces of host memory for one thread, used again once unheld; ``MemoryError`` or ``RuntimeError`` if none."""

    def __init__(self) -> None:
        self._free: list[_Piece] = []
        self._used = 0

    def content(self, structure: bytes, tensors: Sequence[torch.Tensor]) -> Content:
        """Return a content with tensors like these, one after the other in one piece, still to be filled."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        memory = _Use(self, self._piece(sum(sizes)), sum(sizes))
        rooms, start = [], 0
        for tensor, size in zip(tensors, sizes):
            room = memory.flat[start : start + tensor.nbytes]
            rooms.append(room.view(tensor.dtype).view(tensor.shape))
            start += size
        return Content(structure, tuple(rooms), memory)

    def copy(self, content: Content, ready: torch.cuda.Event | None = None) -> Content:
        """Return a copy of a content in one piece of memory, made after CUDA's event ``ready``, if any."""
        copied = self.content(content.structure, content.tensors)
        _copy_into(copied, content.tensors, ready)
        return copied

    def _piece(self, nbytes: int) -> _Piece:
        for piece in list(self._free):
            if nbytes <= piece.memory.numel() <= max(nbytes * _WASTE, 1 << 20):
                self._free.remove(piece)
                return piece
        del self._free[: -self._used - 1]
        return _Piece(max(nbytes, 1))


class _Use:
    """Keeps a piece of memory from being used again for as long as it lives."""

    def __init__(self, pool: HostMemoryPool, piece: _Piece, nbytes: int) -> None:
        self._pool, self._piece = weakref.ref(pool), piece
        self.flat = piece.memory[:nbytes]
        pool._used += 1

    def __del__(self) -> None:
        pool = self._pool()
        if pool is not None:
            pool._used -= 1
            pool._free.append(self._piece)


class _Piece:
    """Host memory, page-locked if there is a GPU: torch's would round up to powers of two, and keep it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if _lock_pages(self.memory):
            weakref.finalize(self, _unlock_pages, self.memory, os.getpid()).atexit = False


def _copy_into(content: Content, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None) -> None:
    """Copy ``tensors`` into those of ``content``, on a stream of their own, and wait until they are there."""
    with torch.no_grad():
        on_device = next((tensor for tensor in tensors if tensor.is_cuda), None)
        if on_device is None:
            for place, tensor in zip(content.tensors, tensors, strict=True):
                place.copy_(tensor)
            return
        stream = torch.cuda.Stream(on_device.device)
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for place, tensor in zip(content.tensors, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        stream.synchronize()


def recorded() -> torch.cuda.Event | None:
    """Return an event of this thread's CUDA stream after all that is in its queue; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _lock_pages(buffer: torch.Tensor) -> bool:
    """Lock the pages of ``buffer``, for speed alone; return whether they have to be unlocked."""
    if not torch.cuda.is_initialized() or buffer.numel() == 0:
        return False
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(error) == 0:
        return True
    nbytes = buffer.numel()
    logger.warning("%d bytes of host memory cannot be page-locked (error %s): copies are slower", nbytes, error)
    _forget_error()
    return False


def _unlock_pages(buffer: torch.Tensor, process: int) -> None:
    """Unlock what :func:`_lock_pages` locked. A failure is only logged: the device may be gone."""
    if os.getpid() != process:  # a forked process has no CUDA
        return
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostUnregister(buffer.data_ptr())
    if int(error) != 0:
        logger.debug("the pages of %d bytes cannot be unlocked (error %s)", buffer.numel(), error)
        _forget_error()


def _forget_error() -> None:
    """Have CUDA forget its last error, which torch would take for that of its next kernel."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as found:
        logger.debug("%s", found)
