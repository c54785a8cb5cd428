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
from typing import TYPE_CHECKING, Any

from checkpointless.system.environment import BOARD_FD_ENV

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed

_MAGIC = b"CPLBRD06"
_HEADER = struct.Struct("<8sQqqqqqq")  # magic; beat to shard as in BoardReading; exit code; began after
_BEAT_OFFSET = 8
_FIELD = struct.Struct("<q")
_MAKING_OFFSET, _COMMITTED_OFFSET, _GENERATION_OFFSET, _SHARD_OFFSET = 16, 24, 32, 40
_EXIT_OFFSET, _BEGAN_OFFSET = 48, 56
_SLOT = struct.Struct("<qIII")  # step, length, how many bytes have a checksum, and that: their crc32
_EMPTY = _SLOT.pack(-1, 0, 0, 0)
_ROLE_OFFSET, _PACES_OFFSET = 64, 72  # how many steps were measured, and the newest ones
_PACE = struct.Struct("<ff")
_SLOTS_OFFSET = 512
_FACTS_SERIES = 6
NO_STEP = -1


@dataclass(frozen=True)
class BoardReading:
    """One reading of a board.

    Attributes:
        beat: how many times the rank's main thread has shown progress.
        making: the optimizer step in progress, counted from 1 (-1: none).
        committed: the last optimizer step that this rank has applied (-1: not known yet).
        shard: the first of the ranks that hold the same state as this one (-1: not known yet).
        began_after: the step whose state training began with in this generation (-1: it has not yet).
    """

    beat: int
    making: int
    committed: int
    generation: int
    shard: int = -1
    began_after: int = NO_STEP


@dataclass(frozen=True)
class PaceReading:
    """What a rank did by itself in its newest steps, in seconds.

    Attributes:
        role: ranks of the same role do the same work in a step.
        steps: how many steps were measured in this generation.
        own: of each of the newest steps, without waits for other ranks; at most :attr:`PaceRing.SIZE`, in no order.
        data: how much of it went by until the batch was there.
    """

    role: int
    steps: int
    own: tuple[float, ...] = ()
    data: tuple[float, ...] = ()


class PaceRing:
    """What the newest steps took a rank by itself, in the memory of its board."""

    SIZE = 16

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def set_role(self, role: int) -> None:
        """Record what identifies the work of this rank's steps."""
        _FIELD.pack_into(self._memory, _ROLE_OFFSET, role)

    def clear(self) -> None:
        """Forget all steps, because another generation begins."""
        _FIELD.pack_into(self._memory, _PACES_OFFSET, 0)

    def add(self, own_s: float, data_s: float) -> None:
        """Record what the rank did by itself in a step, and how much of it went by until the batch was there."""
        (steps,) = _FIELD.unpack_from(self._memory, _PACES_OFFSET)
        at = _PACES_OFFSET + _FIELD.size + steps % self.SIZE * _PACE.size
        _PACE.pack_into(self._memory, at, own_s, data_s)
        _FIELD.pack_into(self._memory, _PACES_OFFSET, steps + 1)

    def read(self) -> PaceReading:
        """Read what the newest steps took. An entry that is being written may be half of two steps."""
        (role,) = _FIELD.unpack_from(self._memory, _ROLE_OFFSET)
        (steps,) = _FIELD.unpack_from(self._memory, _PACES_OFFSET)
        start, known = _PACES_OFFSET + _FIELD.size, min(max(steps, 0), self.SIZE)
        entries = list(_PACE.iter_unpack(self._memory[start : start + known * _PACE.size]))
        return PaceReading(role, steps, tuple(own for own, _ in entries), tuple(data for _, data in entries))


class Board:
    """A rank's board, backed by a memfd of :meth:`create`, which must stay open while the board is in use."""

    SLOT_BYTES = 8 * 1024 * 1024
    #: What is the rank's own at each moment after a step, its streams at the start of the data, its facts, and what
    #: it keeps for another rank.
    SERIES = 9
    SIZE = _SLOTS_OFFSET + 2 * SERIES * SLOT_BYTES
    _ROOM = SLOT_BYTES - _SLOT.size

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._written: dict[int, list[tuple[int, bytes]]] = {}  # by slot: what is in it, each with its place
        self._memory = mmap.mmap(fd, self.SIZE)
        if self._memory[:8] != _MAGIC:
            self._memory.close()
            raise ValueError(f"file descriptor {fd} is not a board")
        self.pace = PaceRing(self._memory)

    @classmethod
    def create(cls, rank: int) -> Board:
        """Create an empty board; its descriptor is close-on-exec.

        Its size is sealed: to read what a rank had cut off would kill the agent (SIGBUS).
        """
        fd = os.memfd_create(f"checkpointless-board-{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, cls.SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        header = _HEADER.pack(_MAGIC, 0, NO_STEP, NO_STEP, 0, -1, -1, NO_STEP)
        os.pwrite(fd, header, 0)
        board = cls(fd)
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
        self._memory.close()
        os.close(self.fd)

    def beat(self) -> None:
        """Record that the main thread has made progress."""
        (count,) = struct.unpack_from("<Q", self._memory, _BEAT_OFFSET)
        struct.pack_into("<Q", self._memory, _BEAT_OFFSET, count + 1)

    def begin_step(self, step: int) -> None:
        """Record which optimizer step is in progress, and that the main thread has made progress."""
        memory = self._memory
        _FIELD.pack_into(memory, _MAKING_OFFSET, step)
        _FIELD.pack_into(memory, _BEAT_OFFSET, _FIELD.unpack_from(memory, _BEAT_OFFSET)[0] + 1)

    def set_committed(self, step: int) -> None:
        """Record which optimizer step was applied last."""
        _FIELD.pack_into(self._memory, _COMMITTED_OFFSET, step)

    def set_generation(self, generation: int) -> None:
        """Record in which generation the rank runs; its training has not begun in it."""
        self.pace.clear()
        _FIELD.pack_into(self._memory, _BEGAN_OFFSET, NO_STEP)
        _FIELD.pack_into(self._memory, _GENERATION_OFFSET, generation)

    def begin_after(self, step: int) -> None:
        """Record that training begins with the state after ``step``; the first call of a generation counts."""
        if self.read().began_after == NO_STEP:
            _FIELD.pack_into(self._memory, _BEGAN_OFFSET, step)
        self.set_committed(step)

    def set_shard(self, first: int) -> None:
        """Record the first of the ranks that hold the same state as this one."""
        _FIELD.pack_into(self._memory, _SHARD_OFFSET, first)

    def set_exit_code(self, code: int | None) -> None:
        """Record that the rank's script has ended, with which code; None: it has not."""
        _FIELD.pack_into(self._memory, _EXIT_OFFSET, -1 if code is None else code)

    def exit_code(self) -> int | None:
        """Return the code with which the rank's script has ended; None if it has not."""
        (code,) = _FIELD.unpack_from(self._memory, _EXIT_OFFSET)
        return code if 0 <= code <= 0xFF else None

    def read(self) -> BoardReading:
        """Read the counters."""
        _, beat, making, committed, generation, shard, _, began_after = _HEADER.unpack_from(self._memory, 0)
        return BoardReading(beat, making, committed, generation, shard, began_after)

    def put_snapshot(self, step: int, payload: bytes, series: int = 0) -> None:
        """Store ``payload`` as the black box's snapshot after ``step``, and keep the snapshot before it.

        A process that dies in the middle leaves a slot whose checksum does not match, which readers skip.

        Args:
            payload: at most 8 MiB, less the 20 bytes of the slot's header.
            series: the number of the series, below :attr:`SERIES`. Each keeps its two newest snapshots.

        Raises:
            ValueError: the payload is larger than a slot.
        """
        self._put(step, [payload], len(payload), zlib.crc32(payload), series)

    def put_parts(self, step: int, head: bytes, parts: Sequence[bytes], series: int = 0) -> None:
        """Store a snapshot as :meth:`put_snapshot` does; parts that are in the slot already are not copied again.

        Args:
            head: what has a checksum. It has to have those of the parts, for :meth:`snapshot` looks at it alone.
            parts: what follows; a part is known again if it is the same object.

        Raises:
            ValueError: all together are larger than a slot.
        """
        self._put(step, [head, *parts], len(head), zlib.crc32(head), series)

    def _put(self, step: int, parts: Sequence[bytes], checked: int, crc: int, series: int) -> None:
        length = sum(map(len, parts))
        if length > self._ROOM:
            raise ValueError(f"a snapshot of {length} bytes does not fit into {self._ROOM}")
        offset, memory = self._offset(step, series), self._memory
        memory[offset : offset + _SLOT.size] = _EMPTY
        written, place = self._written.pop(offset, []), offset + _SLOT.size
        now: list[tuple[int, bytes]] = []
        for part in parts:
            known = written[len(now)] if len(now) < len(written) else None
            if known is None or known[0] != place or known[1] is not part:
                memory[place : place + len(part)] = part
            now.append((place, part))
            place += len(part)
        _SLOT.pack_into(memory, offset, step, length, checked, crc)
        if len(now) > 1:
            self._written[offset] = now

    def drop_snapshot(self, step: int, series: int) -> None:
        """Forget the snapshot that :meth:`put_snapshot` stored after ``step``."""
        if self._read_step(step, series) == step:
            offset = self._offset(step, series)
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

    def put_facts(self, facts: dict[str, object]) -> None:
        """Store what a successor of this process must know from the start: all of it, as plain data."""
        self.put_snapshot(0, json.dumps(facts).encode(), _FACTS_SERIES)

    def facts(self) -> dict[str, Any]:
        """Return what :meth:`put_facts` stored last."""
        kept = self.snapshot(0, _FACTS_SERIES)
        found: dict[str, Any] = json.loads(kept) if kept else {}
        return found

    def clear_snapshots(self) -> None:
        """Forget all snapshots."""
        for series in range(self.SERIES):
            for step in (0, 1):
                offset = self._offset(step, series)
                self._memory[offset : offset + _SLOT.size] = _EMPTY

    def _offset(self, step: int, series: int) -> int:
        return _SLOTS_OFFSET + (2 * series + step % 2) * self.SLOT_BYTES

    def _read_step(self, step: int, series: int) -> int:
        found, *_ = _SLOT.unpack_from(self._memory, self._offset(step, series))
        return int(found)


class Facts:
    """The facts that a rank keeps on its board, by name, as plain data; without a board they end with the process.

    The fact ``environment`` holds environment variables that a successor is given.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._facts: dict[str, Parsed] = board.facts() if board is not None else {}
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
                self._board.put_facts(self._facts)
