"""Buffers of modules that are a rank's own: those of a batch normalisation without synchronisation, for example.

Parameters and optimizer are the same on all ranks of a replica group, so that a peer can give them. Buffers need
not be: what a forward pass writes into them follows from the rank's own samples. Whether they are is not asked at
every step. What has changed since the training began may have changed in another way elsewhere, and is kept, as
long as it is small, with the random streams: in memory that outlives the process, and with the copy on another
node. Buffers that never change cost a comparison with what they were. What is too large to be kept is compared from
rank to rank now and then, and where it differs, a rank whose process was lost cannot be recovered from memory.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from checkpointless.agent.board import Board
from checkpointless.recovery.checksum import digest_bytes
from checkpointless.recovery.exchange import all_gather_json
from checkpointless.recovery.moment import Stage
from checkpointless.recovery.tensor_memory import tensor_bytes
from checkpointless.recovery.transfer import Key, TensorEntry

logger = logging.getLogger(__name__)

#: How many bytes of buffers are kept at each moment; the smallest first.
OWN_BUFFER_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 256 * 1024  # what describes them in a record
#: Of the board, for each moment after a step.
_SERIES = {
    stage: Board.SMALL_SERIES + number
    for number, stage in enumerate((Stage.COMMITTED, Stage.ENDED, Stage.CHECKED, Stage.TURNED, Stage.LOADED))
}
_LENGTH = struct.Struct("<I")  # of the header, which is before the bytes
NOTHING = b""  # a record: no buffer has changed, and none differs from a peer's
_AS_AFTER_THE_STEP = b"="  # a record: that of the moment right after the update

_HELP = "torch.nn.SyncBatchNorm, or a broadcast before each update, makes them the same on all ranks"


class OwnBuffers:
    """Keeps this rank's buffers at the moments after its two newest steps, where they may be its own."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is known: the training begins, or storage gave the state."""
        self._is_own = False
        self._first: tuple[tuple[Key, ...], torch.Tensor] | None = None  # keys, and their bytes in the beginning
        self._records: dict[tuple[int, Stage], bytes] = {}
        self._large: dict[Key, torch.Tensor] = {}  # copies of what is too large, at the newest moment
        self._differ: set[str] = set()  # names of those among them that were seen to differ

    def begin(self, buffers: Mapping[Key, torch.Tensor], group: Sequence[int]) -> None:
        """A training begins. Collective: the ranks compare the buffers that they begin with.

        Args:
            buffers: copies of this rank's.
            group: the ranks that hold the same shard.
        """
        self.forget()
        keys, flat = self._small(buffers)
        self._first = keys, flat
        mine = {"small": digest_bytes(flat) if keys else None, "large": self._large_digests()}
        answers = all_gather_json(mine)
        self._is_own = len({answers[rank]["small"] for rank in group}) > 1
        self._compared([answers[rank]["large"] for rank in group], group)

    def begun_with(self, buffers: Mapping[Key, torch.Tensor]) -> None:
        """A rank whose buffers had not changed since the beginning was filled: with what they began with.

        Args:
            buffers: copies of this rank's.
        """
        if self._first is None:
            self._first = self._small(buffers)

    def keep(self, step: int, stage: Stage, buffers: Mapping[Key, torch.Tensor], board: Board | None) -> None:
        """Keep ``buffers`` as those of this rank at ``stage`` after ``step``.

        Args:
            step: the optimizer step.
            stage: the moment after it.
            buffers: copies that nobody changes.
            board: this rank's, if it has one.
        """
        keys, flat = self._small(buffers)
        if self._first is None:
            self._first = keys, flat
        elif not self._is_own:
            self._is_own = self._first[0] != keys or not torch.equal(self._first[1], flat)
        record = _encode([TensorEntry.of(key, buffers[key]) for key in keys], flat) if self._is_own else NOTHING
        self.keep_record(step, stage, record, board)

    def keep_record(self, step: int, stage: Stage, record: bytes, board: Board | None) -> None:
        """Keep what :meth:`record` gave as that of this rank."""
        if self._records.get((step, stage)) == record:
            return
        self._is_own = self._is_own or record != NOTHING
        known = {key: each for key, each in self._records.items() if key[0] >= step - 1}
        self._records = {**known, (step, stage): record}
        if board is not None:
            alike = stage is not Stage.COMMITTED and known.get((step, Stage.COMMITTED)) == record != NOTHING
            board.put_snapshot(step, _AS_AFTER_THE_STEP if alike else record, series=_SERIES[stage])

    def record(self, step: int, stage: Stage, board: Board | None) -> bytes | None:
        """What was kept at ``stage`` after ``step``; None if that is nowhere.

        Args:
            step: the optimizer step.
            stage: the moment after it.
            board: this rank's, with what the process before this one kept.
        """
        known = self._records.get((step, stage))
        if known is None and board is not None:
            known = board.snapshot(step, series=_SERIES[stage])
            if known == _AS_AFTER_THE_STEP:
                known = board.snapshot(step, series=_SERIES[Stage.COMMITTED])
            if known is not None:
                self.keep_record(step, stage, known, None)
        return known

    def compare(self, step: int, group: Callable[[], Sequence[int]]) -> None:
        """Compare with the peers what is too large to be kept, at ever fewer steps. Collective.

        Args:
            step: the optimizer step, whose buffers were kept last.
            group: gives the ranks that hold the same shard.
        """
        if step & (step - 1):
            return
        answers = all_gather_json(self._large_digests())
        self._compared([answers[rank] for rank in group()], group())

    def lost(
        self,
        held: Mapping[Key, torch.Tensor] | None,
        record: bytes | None,
        refills: Mapping[int, Sequence[int]],
        alive: bool,
    ) -> dict[int, str]:
        """The ranks that cannot be given their own buffers, and why. Collective.

        Args:
            held: this rank's buffers at the moment that is resumed at, if it has them in its memory.
            record: what was kept of them for this rank; None: nothing is.
            refills: rank to fill -> its sources.
            alive: whether this rank is filled, but has its own buffers in its memory.
        """
        kind = "lost" if record is None else "nothing" if record == NOTHING else "own"
        mine: dict[str, object] = {"alive": alive, "record": kind, "differ": sorted(self._differ)}
        if held is not None:
            keys, flat = self._small(held)
            mine |= {"small": digest_bytes(flat) if keys else None, "large": self._large_digests()}
        answers = all_gather_json(mine)
        found: dict[int, str] = {}
        for rank, sources in refills.items():
            if answers[rank]["alive"]:
                continue
            theirs = [answers[source] for source in sources]
            differ = {name for each in theirs for name in each["differ"]}
            differ |= _different([each["large"] for each in theirs])
            own = any(each["record"] == "own" for each in theirs)
            if differ:
                found[rank] = f"{_names(differ)} of its modules' buffers are too large to be kept; {_HELP}"
            elif answers[rank]["record"] != "own" and own and _may_differ(theirs):
                found[rank] = f"what was kept of its modules' buffers is lost; {_HELP}"
        return found

    def _small(self, buffers: Mapping[Key, torch.Tensor]) -> tuple[tuple[Key, ...], torch.Tensor]:
        """The keys of what is small enough to be kept, and its bytes on the host; the rest is noted as large."""
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
    """The buffers of a record, on the host.

    Raises:
        ValueError: an unknown dtype.
    """
    if record == NOTHING:
        return {}
    (length,) = _LENGTH.unpack_from(record)
    entries = json.loads(record[_LENGTH.size : _LENGTH.size + length])
    flat = torch.frombuffer(bytearray(record[_LENGTH.size + length :]) or bytearray(1), dtype=torch.uint8)
    found: dict[Key, torch.Tensor] = {}
    start = 0
    for entry in map(TensorEntry.from_json, entries):
        body = flat[start : start + entry.nbytes].clone()  # aligned for its dtype
        found[entry.key] = body.view(entry.dtype).reshape(entry.shape)
        start += entry.nbytes
    return found


def _encode(entries: Iterable[TensorEntry], flat: torch.Tensor) -> bytes:
    header = json.dumps([entry.to_json() for entry in entries], separators=(",", ":")).encode()
    return _LENGTH.pack(len(header)) + header + flat.numpy().tobytes()


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The bytes of all of them on the host; those of one device are fetched at once."""
    fetched = [
        torch.cat([tensor_bytes(each) for each in alike]).cpu()
        for _, alike in groupby(tensors, lambda each: each.device)
    ]
    return torch.cat(fetched) if fetched else torch.empty(0, dtype=torch.uint8)


def _different(digests: Sequence[Mapping[str, int]]) -> set[str]:
    names = {name for each in digests for name in each}
    return {name for name in names if len({each.get(name) for each in digests}) > 1}


def _may_differ(holders: Sequence[Mapping[str, object]]) -> bool:
    """Whether what is small may differ from rank to rank: one holder alone says nothing of another."""
    return len(holders) < 2 or len({each["small"] for each in holders}) > 1


def _names(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
