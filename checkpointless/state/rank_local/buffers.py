"""Buffers of modules that are a rank's own, for example those of a batch normalisation without synchronisation.

Parameters and optimizer state are the same on all ranks of a replica group, so a peer can give them. Buffers need
not be: what a forward pass writes into them follows from the rank's own samples. The ranks do not compare them at
every step. Buffers that have changed since the training began may have changed differently elsewhere. As long as
they are small, they are kept with the random streams: in memory that outlives the process, and with the copy on
another node. Buffers that never change cost a comparison with their first values. Buffers that are too large to be
kept are compared between ranks now and then. If they differ, a rank whose process was lost cannot be recovered from
memory.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.serialization.digest import digest_bytes
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from checkpointless.transfer.exchange import all_gather_json
from checkpointless.transfer.tensor_entry import Key, TensorEntry

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json

logger = logging.getLogger(__name__)

#: How many bytes of buffers are kept at each point, the smallest buffers first.
OWN_BUFFER_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 256 * 1024  # the limit of the header that describes them in a record
#: The board's series for each point after a step.
_SERIES = {
    stage: Board.SMALL_SERIES + number
    for number, stage in enumerate(
        (
            SnapshotPoint.COMMITTED,
            SnapshotPoint.ENDED,
            SnapshotPoint.CHECKED,
            SnapshotPoint.TURNED,
            SnapshotPoint.LOADED,
        )
    )
}
_LENGTH = struct.Struct("<I")  # the length of the header, which precedes the bytes
_NEVER = 1 << 62, 0  # a point that is never reached
NOTHING = b""  # the record that no buffer has changed, and none differs from a peer's
_AS_AFTER_THE_STEP = b"="  # stands for the record of the point right after the update

_HELP = "torch.nn.SyncBatchNorm, or a broadcast before each update, makes them the same on all ranks"


class OwnBuffers:
    """Keeps this rank's buffers at the points after its two newest steps, if they may be its own.

    Attributes:
        are_settled: whether it is kept that there are no buffers, so that :meth:`keep` need not be told it again.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget everything, because the training begins or storage gave the state."""
        self._is_own = False
        self._first: tuple[tuple[Key, ...], torch.Tensor] | None = None  # keys, and their bytes at the beginning
        self._records: dict[tuple[int, SnapshotPoint], bytes] = {}
        self._large: dict[Key, torch.Tensor] = {}  # copies of the buffers that are too large, at the newest point
        self._differ: set[str] = set()  # names of large buffers that were seen to differ
        self.are_settled = False
        self._nothing_before: tuple[int, int] | None = None  # before this point no buffer had changed
        self._marked: tuple[Board, int] | None = None  # the board that says so

    def begin(self, buffers: Mapping[Key, torch.Tensor], group: Sequence[int]) -> None:
        """Begin a training: the ranks compare the buffers that they begin with. Collective."""
        self.forget()
        keys, flat = self._small(buffers)
        self._first = keys, flat
        mine: dict[str, Json] = {"small": digest_bytes(flat) if keys else None, "large": self._large_digests()}
        answers = all_gather_json(mine)
        self._is_own = len({answers[rank]["small"] for rank in group}) > 1
        self._compared([answers[rank]["large"] for rank in group], group)

    def begun_with(self, buffers: Mapping[Key, torch.Tensor]) -> None:
        """Note the first buffers of a rank that was filled, if its buffers had not changed since the beginning."""
        if self._first is None:
            self._first = self._small(buffers)

    def keep(
        self, step: int, stage: SnapshotPoint, buffers: Mapping[Key, torch.Tensor], board: Board | None
    ) -> None:
        """Keep ``buffers`` as those of this rank at ``stage`` after ``step``.

        Args:
            board: this rank's board, if it has one.
        """
        if not buffers and self._first is not None and not self._first[0] and not self._is_own:
            self._large = {}
            self._keep_nothing(board)
            self.are_settled = True
            return
        keys, flat = self._small(buffers)
        if self._first is None:
            self._first = keys, flat
        elif not self._is_own:
            self._is_own = self._first[0] != keys or not torch.equal(self._first[1], flat)
        if self._is_own:
            record = _encode([TensorEntry.of(key, buffers[key]) for key in keys], flat)
            self.keep_record(step, stage, record, board)
        else:
            self._keep_nothing(board)

    def _keep_nothing(self, board: Board | None) -> None:
        """Keep that no buffer has changed until now; it holds for every point until one has."""
        self._nothing_before = _NEVER
        if board is not None and self._marked != (board, board.clears):
            board.mark_buffers(*_NEVER)
            self._marked = board, board.clears

    def keep_record(self, step: int, stage: SnapshotPoint, record: bytes, board: Board | None) -> None:
        """Keep ``record``, as :meth:`record` returns it, for this rank at ``stage`` after ``step``."""
        if self._records.get((step, stage)) == record:
            return
        self._is_own = self._is_own or record != NOTHING
        self.are_settled = False
        known = {key: each for key, each in self._records.items() if key[0] >= step - 1}
        self._records = {**known, (step, stage): record}
        if board is not None:
            alike = (
                stage is not SnapshotPoint.COMMITTED
                and known.get((step, SnapshotPoint.COMMITTED)) == record != NOTHING
            )
            board.put_snapshot(step, _AS_AFTER_THE_STEP if alike else record, series=_SERIES[stage])
        if record != NOTHING:
            if self._nothing_before is not None:
                self._nothing_before = min(self._nothing_before, (step, stage))
            if board is not None and board.buffers_mark() > (step, stage):
                board.mark_buffers(step, stage)

    def record(self, step: int, stage: SnapshotPoint, board: Board | None) -> bytes | None:
        """Return the record that was kept at ``stage`` after ``step``; None if there is none."""
        known = self._records.get((step, stage))
        if known is None and self._nothing_before is not None and (step, stage) < self._nothing_before:
            return NOTHING
        if known is None and board is not None:
            known = board.snapshot(step, series=_SERIES[stage])
            if known == _AS_AFTER_THE_STEP:
                known = board.snapshot(step, series=_SERIES[SnapshotPoint.COMMITTED])
            if known is None and (step, stage) < board.buffers_mark():
                return NOTHING
            if known is not None:
                self.keep_record(step, stage, known, None)
        return known

    def compare(self, step: int, group: Sequence[int]) -> None:
        """Compare the buffers that are too large to be kept with the peers', at ever fewer steps. Collective."""
        if step & (step - 1):
            return
        answers = all_gather_json(self._large_digests())
        self._compared([answers[rank] for rank in group], group)

    def lost(
        self,
        held: Mapping[Key, torch.Tensor] | None,
        record: bytes | None,
        refills: Mapping[int, Sequence[int]],
        alive: bool,
        updated: Collection[Key] = (),
    ) -> dict[int, str]:
        """Return the ranks that cannot be given their own buffers, and why. Collective.

        Args:
            held: this rank's buffers at the point that is resumed at, if it has them in memory.
            record: the record of these buffers that was kept for this rank; None: there is none.
            refills: maps each rank to fill to its sources.
            alive: whether this rank is to be filled, but has its own buffers in memory.
            updated: the keys of the buffers that an update writes to, which a peer gives.
        """
        kind = "lost" if record is None else "nothing" if record == NOTHING else "own"
        mine: dict[str, Json] = {"alive": alive, "record": kind, "differ": sorted(self._differ)}
        if held is not None:
            keys, flat = self._small(held)
            mine |= {"small": digest_bytes(flat) if keys else None, "large": self._large_digests()}
            mine["updated"] = {
                str(key[-1]): digest_bytes(tensor_bytes(held[key])) for key in updated if key in held
            }
        answers = all_gather_json(mine)
        found: dict[int, str] = {}
        for rank, sources in refills.items():
            theirs = [answers[source] for source in sources]
            told = _different([each["updated"] for each in theirs if each.get("updated")])
            if told:
                found[rank] = f"the update writes to {_names(told)}, which differ between ranks; {_HELP}"
            if told or answers[rank]["alive"]:
                continue
            differ = {name for each in theirs for name in each["differ"]}
            differ |= _different([each["large"] for each in theirs])
            own = any(each["record"] == "own" for each in theirs)
            if differ:
                found[rank] = f"{_names(differ)} of its modules' buffers are too large to be kept; {_HELP}"
            elif answers[rank]["record"] != "own" and own and _may_differ(theirs):
                found[rank] = f"what was kept of its modules' buffers is lost; {_HELP}"
        return found

    def _small(self, buffers: Mapping[Key, torch.Tensor]) -> tuple[tuple[Key, ...], torch.Tensor]:
        """Return keys and host bytes of the buffers that are small enough to be kept; note the others as large."""
        room, header = OWN_BUFFER_BYTES, _HEADER_BYTES
        small: set[Key] = set()
        for key in sorted(buffers, key=lambda key: buffers[key].nbytes):
            room -= buffers[key].nbytes
            header -= len(str(key)) + 100
            if room < 0 or header < 0:
                break
            small.add(key)
        self._large = {key: buffer for key, buffer in buffers.items() if key not in small}
        keys = tuple(key for key in buffers if key in small)
        return keys, _flat(buffers[key] for key in keys)

    def _large_digests(self) -> dict[str, int]:
        return {str(key[-1]): digest_bytes(tensor_bytes(copy)) for key, copy in self._large.items()}

    def _compared(self, digests: Sequence[Mapping[str, int]], group: Sequence[int]) -> None:
        known = bool(self._differ)
        self._differ |= _different(digests)
        if self._differ and not known and dist.get_rank() == min(group):
            logger.warning(
                "%s of the modules' buffers differ from rank to rank, and no more than %d MiB of buffers are kept: "
                "if the process of a rank is lost, its state cannot be recovered from memory; %s",
                _names(self._differ),
                OWN_BUFFER_BYTES >> 20,
                _HELP,
            )


def decode(record: bytes) -> dict[Key, torch.Tensor]:
    """Return the buffers of a record, on the host.

    Raises:
        ValueError: the record names an unknown dtype.
    """
    if record == NOTHING:
        return {}
    (length,) = _LENGTH.unpack_from(record)
    entries = json.loads(record[_LENGTH.size : _LENGTH.size + length])
    flat = torch.frombuffer(bytearray(record[_LENGTH.size + length :]) or bytearray(1), dtype=torch.uint8)
    found: dict[Key, torch.Tensor] = {}
    start = 0
    for entry in map(TensorEntry.from_json, entries):
        body = flat[start : start + entry.nbytes].clone()  # the copy is aligned for its dtype
        found[entry.key] = body.view(entry.dtype).reshape(entry.shape)
        start += entry.nbytes
    return found


def _encode(entries: Iterable[TensorEntry], flat: torch.Tensor) -> bytes:
    header = json.dumps([entry.to_json() for entry in entries], separators=(",", ":")).encode()
    return _LENGTH.pack(len(header)) + header + flat.numpy().tobytes()


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all ``tensors`` on the host; those of one device are fetched together."""
    fetched = [
        torch.cat([tensor_bytes(each) for each in alike]).cpu()
        for _, alike in groupby(tensors, lambda each: each.device)
    ]
    return torch.cat(fetched) if fetched else torch.empty(0, dtype=torch.uint8)


def _different(digests: Sequence[Mapping[str, int]]) -> set[str]:
    names = {name for each in digests for name in each}
    return {name for name in names if len({each.get(name) for each in digests}) > 1}


def _may_differ(holders: Sequence[Mapping[str, object]]) -> bool:
    """Return whether small buffers may differ between ranks: one holder alone says nothing about another."""
    return len(holders) < 2 or len({each["small"] for each in holders}) > 1


def _names(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
