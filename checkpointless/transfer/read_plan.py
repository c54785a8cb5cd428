"""Plan how the bytes of a bucket are read from another process's memory: pure functions of the parts' sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Bytes of one call: what it has brought is digested while the cache of the core still has it.
CALL_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` (exclusive) of the bucket's part with number ``part``, at both ends."""

    part: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The piece's length in bytes."""
        return self.stop - self.start


def calls_of(sizes: Sequence[int], call_bytes: int, most: int) -> Iterator[list[Piece]]:
    """Cut the parts of a bucket into calls, which cover every byte once and in order.

    Args:
        sizes: the sizes of the parts in bytes; those of 0 bytes are left out.
        call_bytes: the most bytes of a call, at least 1.
        most: the most pieces of a call, at least 1.
    """
    call: list[Piece] = []
    room = call_bytes
    for part, size in enumerate(sizes):
        start = 0
        while start < size:
            piece = Piece(part, start, min(size, start + room))
            call.append(piece)
            start = piece.stop
            room -= piece.nbytes
            if room == 0 or len(call) == most:
                yield call
                call, room = [], call_bytes
    if call:
        yield call


def left_of(call: Sequence[Piece], done: int) -> list[Piece]:
    """Return what is left of a call of which the first ``done`` bytes were read.

    Args:
        call: the pieces of the call.
        done: how many bytes were read, at most as many as the call has.
    """
    left: list[Piece] = []
    for piece in call:
        skipped = min(done, piece.nbytes)
        done -= skipped
        if skipped < piece.nbytes:
            left.append(Piece(piece.part, piece.start + skipped, piece.stop))
    return left
