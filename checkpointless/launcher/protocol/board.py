"""The board: a rank's few shared facts, in memory that outlives the rank's process.

The rank writes with plain memory stores, and the agent reads without asking, so a rank that is stopped, wedged or
dead can still be read. The black box keeps the rank's two newest snapshots of what no peer holds (its random
streams, and buffers of its modules), so that a respawned rank gets its own back. Unused parts of it take no memory.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkpointless.system.environment import BOARD_FD_ENV

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed

_MAGIC = b"CPLBRD06"
_BEAT, _MAKING, _COMMITTED, _GENERATION, _SHARD, _EXIT, _BEGAN, _ROLE, _PACES = range(1, 10)  # words of 8 bytes
_PACES_OFFSET = 80  # after the number of steps that were measured: the newest ones, two floats each
_SLOT = struct.Struct("<qIII")  # step, length, how many bytes have a checksum, and that: their crc32
_EMPTY = _SLOT.pack(-1, 0, 0, 0)
_SLOTS_OFFSET = 512
_FACTS_SERIES = 6
NO_STEP = -1


@dataclass(frozen=True)
class BoardReading:
    """One reading of a board."""

    beat: int  # how many times the rank's main thread has shown progress
    making: int  # the optimizer step in progress, counted from 1 (-1: none)
    committed: int  # the last optimizer step that this rank has applied (-1: not known yet)
    generation: int
    shard: int = -1  # the first of the ranks that hold the same state as this one (-1: not known yet)
    began_after: int = NO_STEP  # the step whose state training began with in this generation (-1: it has not yet)


@dataclass(frozen=True)
class PaceReading:
    """What a rank did by itself in its newest steps, in seconds."""

    role: int  # ranks of the same role do the same work in a step
    steps: int  # how many steps were measured in this generation
    own: tuple[float, ...] = ()  # of each, without waits for other ranks; at most ``Board.PACES``, in no order
    data: tuple[float, ...] = ()  # how much of it went by until the batch was there


class Board:
    """A rank's board, backed by a memfd of :meth:`create`, which must stay open while the board is in use."""

    SLOT_BYTES = 8 * 1024 * 1024
    #: What is the rank's own at each moment after a step, its streams at the start of the data, its facts, and what
    #: it keeps for another rank.
    SERIES = 9
    SIZE = _SLOTS_OFFSET + 2 * SERIES * SLOT_BYTES
    PACES = 16
    _ROOM = SLOT_BYTES - _SLOT.size

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._written: dict[int, list[tuple[int, bytes]]] = {}  # by slot: what is in it, each with its place
        self._memory = mmap.mmap(fd, self.SIZE)
        if self._memory[:8] != _MAGIC:
            self._memory.close()
            raise ValueError(f"file descriptor {fd} is not a board")
        self._words = memoryview(self._memory)[:_SLOTS_OFFSET].cast("q")
        self._paces = memoryview(self._memory)[_PACES_OFFSET : _PACES_OFFSET + 8 * self.PACES].cast("f")

    @classmethod
    def create(cls, rank: int) -> Board:
        """Create an empty board; its descriptor is close-on-exec.

        Its size is sealed: to read what a rank had cut off would kill the agent (SIGBUS).
        """
        fd = os.memfd_create(f"checkpointless-board-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, cls.SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, _MAGIC, 0)
        board = cls(fd)
        for word in (_MAKING, _COMMITTED, _SHARD, _BEGAN):
            board._words[word] = NO_STEP
        board.clear_snapshots()
        board.set_exit_code(None)
        return board

    @classmethod
    def from_environment(cls) -> Board | None:
        """Return the board that the agent gave this process, or None under another launcher."""
        value = os.environ.get(BOARD_FD_ENV)
        return cls(int(value)) if value else None

    def close(self) -> None:
        """Unmap the memory and close the descriptor."""
        self._words.release()
        self._paces.release()
        self._memory.close()
        os.close(self.fd)

    def beat(self) -> None:
        """Record that the main thread has made progress."""
        self._words[_BEAT] += 1

    def begin_step(self, step: int) -> None:
        """Record which optimizer step is in progress, and that the main thread has made progress."""
        self._words[_MAKING] = step
        self.beat()

    def set_committed(self, step: int) -> None:
        """Record which optimizer step was applied last."""
        self._words[_COMMITTED] = step

    def set_generation(self, generation: int) -> None:
        """Record in which generation the rank runs; its training has not begun in it."""
        self._words[_PACES], self._words[_BEGAN] = 0, NO_STEP
        self._words[_GENERATION] = generation

    def begin_after(self, step: int) -> None:
        """Record that training begins with the state after ``step``; the first call of a generation counts."""
        if self._words[_BEGAN] == NO_STEP:
            self._words[_BEGAN] = step
        self.set_committed(step)

    def set_shard(self, first: int) -> None:
        """Record the first of the ranks that hold the same state as this one."""
        self._words[_SHARD] = first

    def set_exit_code(self, code: int | None) -> None:
        """Record that the rank's script has ended, with which code; None: it has not."""
        self._words[_EXIT] = -1 if code is None else code

    def exit_code(self) -> int | None:
        """Return the code with which the rank's script has ended; None if it has not."""
        code = self._words[_EXIT]
        return code if 0 <= code <= 0xFF else None

    def set_role(self, role: int) -> None:
        """Record what identifies the work of this rank's steps."""
        self._words[_ROLE] = role

    def add_pace(self, own_s: float, data_s: float) -> None:
        """Record what the rank did by itself in a step, and how much of it went by until the batch was there."""
        at = 2 * (self._words[_PACES] % self.PACES)
        self._paces[at], self._paces[at + 1] = own_s, data_s
        self._words[_PACES] += 1

    def paces(self) -> PaceReading:
        """Read what the newest steps took. An entry that is being written may be half of two steps."""
        steps = self._words[_PACES]
        entries = self._paces[: 2 * min(max(steps, 0), self.PACES)].tolist()
        return PaceReading(self._words[_ROLE], steps, tuple(entries[::2]), tuple(entries[1::2]))

    def read(self) -> BoardReading:
        """Read the counters."""
        beat, making, committed, generation, shard, _, began_after = self._words[_BEAT:_ROLE].tolist()
        return BoardReading(beat, making, committed, generation, shard, began_after)

    def put_snapshot(self, step: int, head: bytes, series: int = 0, parts: Sequence[bytes] = ()) -> None:
        """Store a series' snapshot after ``step``, and keep the one before; the series is a number.

        A process that dies in the middle leaves a slot whose checksum does not match, which readers skip. It is
        that of ``head``, which has to have those of the parts that follow. A part that is in the slot already, the
        same object, is not copied again.

        Raises:
            ValueError: all together are larger than a slot (8 MiB less the 20 bytes of its header).
        """
        length, crc = len(head) + sum(map(len, parts)), zlib.crc32(head)
        if length > self._ROOM:
            raise ValueError(f"a snapshot of {length} bytes does not fit into {self._ROOM}")
        offset, memory = self._offset(step, series), self._memory
        memory[offset : offset + _SLOT.size] = _EMPTY
        written, place = self._written.pop(offset, []), offset + _SLOT.size
        now: list[tuple[int, bytes]] = []
        for part in (head, *parts):
            known = written[len(now)] if len(now) < len(written) else None
            if known is None or known[0] != place or known[1] is not part:
                memory[place : place + len(part)] = part
            now.append((place, part))
            place += len(part)
        _SLOT.pack_into(memory, offset, step, length, len(head), crc)
        if parts:
            self._written[offset] = now

    def drop_snapshot(self, step: int, series: int) -> None:
        """Forget the snapshot that :meth:`put_snapshot` stored after ``step``."""
        offset = self._offset(step, series)
        if _SLOT.unpack_from(self._memory, offset)[0] == step:
            self._memory[offset : offset + _SLOT.size] = _EMPTY

    def snapshot(self, step: int, series: int = 0) -> bytes | None:
        """Return the snapshot after ``step``, or None if it is missing or incomplete."""
        offset = self._offset(step, series)
        found, length, checked, crc = _SLOT.unpack_from(self._memory, offset)
        if found != step or step < 0 or length > self._ROOM or checked > length:
            return None
        start = offset + _SLOT.size
        payload = bytes(self._memory[start : start + length])
        return payload if zlib.crc32(payload[:checked]) == crc else None

    def clear_snapshots(self) -> None:
        """Forget all snapshots."""
        for series in range(self.SERIES):
            for step in (0, 1):
                offset = self._offset(step, series)
                self._memory[offset : offset + _SLOT.size] = _EMPTY

    def _offset(self, step: int, series: int) -> int:
        return _SLOTS_OFFSET + (2 * series + step % 2) * self.SLOT_BYTES


class Facts:
    """The facts that a rank keeps on its board, by name, as plain data; without a board they end with the process.

    The fact ``environment`` holds environment variables that a successor is given.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        kept = board.snapshot(0, _FACTS_SERIES) if board is not None else None
        self._facts: dict[str, Parsed] = json.loads(kept) if kept else {}
        for name, value in self._facts.get("environment", {}).items():
            os.environ.setdefault(name, value)

    def get(self, name: str, default: Json = None) -> Parsed:
        """Return the fact of this name, or ``default``."""
        return self._facts.get(name, default)

    def keep(self, name: str, value: Json) -> None:
        """Record a fact that a later generation, or a successor of this process, must know from the start."""
        if self._facts.get(name) != value:
            self._facts = {**self._facts, name: value}
            if self._board is not None:
                self._board.put_snapshot(0, json.dumps(self._facts).encode(), _FACTS_SERIES)
