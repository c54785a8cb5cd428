"""A part in one piece of host memory, and the memory that is used for part after part."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from checkpointless.local_checkpoint.content import Content
from checkpointless.recovery.host_memory import lock_pages, unlock_pages
from checkpointless.serialization import state_tree
from checkpointless.serialization.tensor_memory import dtype_name, dtype_of

_ALIGNMENT = 256  # bytes; enough for each dtype, and for copies at full speed
_WASTE = 2  # a buffer is used again for parts of at least this fraction of its size


@dataclass(frozen=True)
class HostPart:
    """A part whose tensors lie one after the other.

    Attributes:
        content: the part; its tensors are views of ``memory``.
        memory: flat uint8 in host memory.
        piece: what the memory is a part of. As long as it lives, its pages stay locked.
    """

    content: Content
    memory: torch.Tensor
    piece: HostPiece | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the structure and of the tensors, with the gaps between them."""
        return len(self.content.structure) + self.memory.numel()

    def header(self) -> bytes:
        """Return everything but the memory."""
        tensors = [[dtype_name(each.dtype), list(each.shape)] for each in self.content.tensors]
        header: bytes = state_tree.dumps({"structure": self.content.structure, "tensors": tensors})
        return header


class HostPiece:
    """A piece of host memory, page-locked where there is a GPU.

    torch's own pinned memory rounds each piece up to a power of two, and keeps it when it is given back.

    Args:
        nbytes: its size.
        shared: whether processes that are forked later share the memory, instead of having it as it was then.

    Raises:
        MemoryError: there is no such memory.
        RuntimeError: the same, as torch says it.

    Attributes:
        memory: the piece, flat uint8.
    """

    def __init__(self, nbytes: int, shared: bool = False) -> None:
        self._process = os.getpid()
        self._is_locked = False
        if shared:
            try:
                self.memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
            except OSError as error:
                raise MemoryError(f"{nbytes} bytes of shared memory: {error}") from error
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._is_locked = lock_pages(self.memory)

    def __del__(self) -> None:
        if self._is_locked and os.getpid() == self._process:  # a forked process has no CUDA
            unlock_pages(self.memory)


class HostMemoryPool:
    """Pieces of host memory that are used again and again.

    Args:
        shared: whether processes that are forked later share the memory.
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._pieces: list[HostPiece] = []
        self._used: set[int] = set()

    def take(self, nbytes: int) -> HostPiece:
        """Return a piece of at least ``nbytes`` bytes, of which nothing else is used until :meth:`keep_only`."""
        for piece in self._pieces:
            if id(piece) not in self._used and nbytes <= piece.memory.numel() <= max(nbytes * _WASTE, 1 << 20):
                break
        else:
            piece = HostPiece(max(nbytes, 1), self._shared)
            self._pieces.append(piece)
        self._used.add(id(piece))
        return piece

    def keep_only(self, parts: Collection[HostPart]) -> None:
        """Note that no memory is used any more but that of ``parts``; give back what does not fit any more."""
        self._used = {id(part.piece) for part in parts}
        spare = [piece for piece in self._pieces if id(piece) not in self._used]
        self._pieces = [piece for piece in self._pieces if id(piece) in self._used]
        self._pieces += spare[-len(self._pieces) - 1 :]


def laid_out(content: Content, pool: HostMemoryPool) -> HostPart:
    """Return room for a part with the tensors of ``content``, which are still to be copied."""
    entries = [(tensor.dtype, tuple(tensor.shape)) for tensor in content.tensors]
    return _part(content.structure, entries, pool, content.form)


def room_for(header: bytes, nbytes: int, pool: HostMemoryPool) -> HostPart:
    """Return room for a part that another rank sends.

    Args:
        header: what :meth:`HostPart.header` returned there.
        nbytes: the bytes of its memory.
        pool: gives the memory.

    Raises:
        ValueError: header and size do not belong together.
    """
    try:
        plain = state_tree.loads(header)
        structure, tensors = plain["structure"], plain["tensors"]
        entries = [(dtype_of(dtype), tuple(int(size) for size in shape)) for dtype, shape in tensors]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a neighbor sent a part that cannot be read: {error!r}") from error
    if _nbytes(entries) != nbytes:
        raise ValueError(f"a neighbor sent a part of {nbytes} bytes whose tensors take {_nbytes(entries)}")
    return _part(structure, entries, pool)


def copy_into(part: HostPart, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None = None) -> None:
    """Copy ``tensors`` into their places in ``part``, and wait until they are there.

    Args:
        part: the room.
        tensors: the tensors, on the host or on one GPU.
        ready: an event of CUDA, after which the tensors are what is to be copied; None: they are already. The
            copies are made on a stream of their own.
    """
    with torch.no_grad():
        on_device = next((tensor for tensor in tensors if tensor.is_cuda), None)
        if on_device is None:
            for place, tensor in zip(part.content.tensors, tensors, strict=True):
                place.copy_(tensor)
            return
        stream = torch.cuda.Stream(on_device.device)
        if ready is not None:
            stream.wait_event(ready)
        with torch.cuda.stream(stream):
            for place, tensor in zip(part.content.tensors, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        stream.synchronize()


def recorded() -> torch.cuda.Event | None:
    """Return an event of this thread's CUDA stream after all that is in its queue; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _part(
    structure: bytes, entries: Sequence[tuple[torch.dtype, tuple[int, ...]]], pool: HostMemoryPool, form: str = ""
) -> HostPart:
    nbytes = _nbytes(entries)
    piece = pool.take(nbytes)
    memory = piece.memory[:nbytes]
    return HostPart(Content(structure, _views(memory, entries), form), memory, piece)


def _nbytes(entries: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(_rounded(torch.Size(shape).numel() * dtype.itemsize) for dtype, shape in entries)


def _views(
    memory: torch.Tensor, entries: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[torch.Tensor, ...]:
    views, start = [], 0
    for dtype, shape in entries:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        views.append(memory[start : start + nbytes].view(dtype).view(shape))
        start += _rounded(nbytes)
    return tuple(views)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
