"""What a rank holds by itself and no peer can give: its random streams and its modules' buffers.

Before each optimizer update every rank sends them to the rank ``jump`` places further on, in case its node is lost
with its boards. That rank keeps those of the two newest steps, in its memory and on its board: 10 to 50 kB per rank
and step, and the buffers, which are kept like a stream.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from checkpointless.inprocess import ParameterUpdateLock
from checkpointless.inprocess.wrap import active_call_wrapper
from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import UPDATED_BUFFERS, SnapshotPoint, TrainingState
from checkpointless.state.rank_local.agreement import require_agreement
from checkpointless.state.rank_local.declared import declared_state
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import MemoryChecksumManager, digest_each, digest_value
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from checkpointless.system.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.transfer.exchange import (
    MAX_BYTES,
    all_gather_json,
    exchange,
    receive_bytes,
    send_bytes,
    to_bytes,
    to_tensor,
    wire_device,
)
from checkpointless.transfer.tensor_entry import Key, TensorEntry

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json


logger = logging.getLogger(__name__)

#: How many bytes of buffers are kept at each point, the smallest buffers first.
OWN_BUFFER_BYTES = 4 * 1024 * 1024
_HEADER_BYTES = 256 * 1024  # the limit of the header that describes them in a record
_BUFFERS = "buffers"  # the name of the record, among the streams that it is kept with
NOTHING = b""  # the record that no buffer has changed, and none differs from a peer's

_HELP = "torch.nn.SyncBatchNorm, or a broadcast before each update, makes them the same on all ranks"


def _own_board() -> Board | None:
    """Return this rank's board, or None under another launcher or outside a block."""
    call = active_call_wrapper()
    return call.board if call is not None else None


class _OwnBuffers:
    """Finds out whether this rank's buffers are its own; ``record``, one object until they change, has them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget everything, because the training begins or storage gave the state."""
        self._is_own = False
        self._first: tuple[tuple[Key, ...], torch.Tensor] | None = None  # keys, and their bytes at the beginning
        self.record = NOTHING
        self._large: dict[Key, torch.Tensor] = {}  # copies of the buffers that are too large, at the newest point
        self._differ: set[str] = set()  # names of large buffers that were seen to differ

    def begin(self, buffers: Mapping[Key, torch.Tensor], group: Sequence[int]) -> None:
        """Begin a training: the ranks compare the buffers that they begin with. Collective."""
        self.forget()
        self._first = self._small(buffers)
        answers = all_gather_json(self._told(self._first))
        self._is_own = len({answers[rank]["small"] for rank in group}) > 1
        self._compared([answers[rank]["large"] for rank in group], group)

    def begun_with(self, buffers: Mapping[Key, torch.Tensor], record: bytes) -> None:
        """Note the buffers of a rank that resumes, and the record that it had of them."""
        self._is_own = self._is_own or record != NOTHING
        if self._first is None:
            self._first = self._small(buffers)

    def keep(self, buffers: Mapping[Key, torch.Tensor]) -> None:
        """Record ``buffers``, if they are this rank's own by now."""
        if not buffers and self._first is not None and not self._first[0] and not self._is_own:
            self._large = {}
            return
        keys, flat = self._small(buffers)
        if self._first is None:
            self._first = keys, flat
        elif not self._is_own:
            self._is_own = self._first[0] != keys or not torch.equal(self._first[1], flat)
        record = NOTHING
        if self._is_own:
            entries = [TensorEntry.of(key, buffers[key]).to_json() for key in keys]
            record = msgspec.msgpack.encode([entries, flat.numpy().tobytes()])
        if record != self.record:
            self.record = record

    def compare(self, group: Sequence[int]) -> None:
        """Compare the buffers that are too large to be kept with the peers'. Collective."""
        answers = all_gather_json(_digests(self._large))
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

        ``held`` and ``record``: this rank's at that point; ``alive``: it is filled, but has them; ``updated``: a
        peer gives them.
        """
        kind = "lost" if record is None else "nothing" if record == NOTHING else "own"
        mine: dict[str, Json] = {"alive": alive, "record": kind, "differ": sorted(self._differ)}
        if held is not None:
            mine |= self._told(self._small(held))
            mine["updated"] = _digests({key: held[key] for key in updated if key in held})
        answers = all_gather_json(mine)
        found: dict[int, str] = {}
        for rank, sources in refills.items():
            theirs = [answers[source] for source in sources]
            told = differing([each["updated"] for each in theirs if each.get("updated")])
            if told:
                found[rank] = f"the update writes to {_names(told)}, which differ between ranks; {_HELP}"
            if told or answers[rank]["alive"]:
                continue
            differ = {name for each in theirs for name in each["differ"]}
            differ |= differing([each["large"] for each in theirs])
            own = any(each["record"] == "own" for each in theirs)
            if differ:
                found[rank] = f"{_names(differ)} of its modules' buffers are too large to be kept; {_HELP}"
            elif answers[rank]["record"] != "own" and own and _may_differ(theirs):
                found[rank] = f"what was kept of its modules' buffers is lost; {_HELP}"
        return found

    def _told(self, small: tuple[tuple[Key, ...], torch.Tensor]) -> dict[str, Json]:
        keys, flat = small
        return {"small": _digest(flat) if keys else None, "large": _digests(self._large)}

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

    def _compared(self, digests: Sequence[Mapping[str, int]], group: Sequence[int]) -> None:
        known = bool(self._differ)
        self._differ |= differing(digests)
        if self._differ and not known and dist.get_rank() == min(group):
            logger.warning(
                "%s of the modules' buffers differ from rank to rank, and no more than %d MiB of buffers are kept: "
                "if the process of a rank is lost, its state cannot be recovered from memory; %s",
                _names(self._differ),
                OWN_BUFFER_BYTES >> 20,
                _HELP,
            )


_digest = MemoryChecksumManager().digest


def _digests(buffers: Mapping[Key, torch.Tensor]) -> dict[str, int]:
    return {str(key[-1]): digest for key, digest in digest_each(buffers).items()}


def _decode(record: bytes) -> dict[Key, torch.Tensor]:
    if record == NOTHING:
        return {}
    entries, data = msgspec.msgpack.decode(record)
    flat = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)
    found: dict[Key, torch.Tensor] = {}
    start = 0
    for entry in map(TensorEntry.from_json, entries):
        body = flat[start : start + entry.nbytes].clone()  # the copy is aligned for its dtype
        found[entry.key] = body.view(entry.dtype).reshape(entry.shape)
        start += entry.nbytes
    return found


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all ``tensors`` on the host; those of one device are fetched together."""
    fetched = [
        torch.cat([tensor_bytes(each) for each in alike]).cpu()
        for _, alike in groupby(tensors, lambda each: each.device)
    ]
    return torch.cat(fetched) if fetched else torch.empty(0, dtype=torch.uint8)


def differing(digests: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the names under which ranks have different digests."""
    names = {name for each in digests for name in each}
    return {name for name in names if len({each.get(name) for each in digests}) > 1}


def _may_differ(holders: Sequence[Mapping[str, object]]) -> bool:
    """Return whether small buffers may differ between ranks: one holder alone says nothing about another."""
    return len(holders) < 2 or len({each["small"] for each in holders}) > 1


def _names(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


DATA_SERIES = 5  # the board's series for the streams at the start of an iterator over the training data
#: The board's series for each point after a step.
_STREAM_SERIES = {
    SnapshotPoint.COMMITTED: 0,
    SnapshotPoint.ENDED: 1,
    SnapshotPoint.CHECKED: 2,
    SnapshotPoint.TURNED: 3,
    SnapshotPoint.LOADED: 4,
    SnapshotPoint.ACCUMULATED: 7,
}
_LATER = (SnapshotPoint.ENDED, SnapshotPoint.CHECKED, SnapshotPoint.TURNED, SnapshotPoint.ACCUMULATED)
_LIBRARIES = ("python", "numpy", "torch", "cuda")  # other sources keep what is no state of a step, too
RANDOM_STREAM = "random stream"  # how the names of their digests begin


class _OwnStreams:
    """Keeps this rank's random streams, by step and stage, also where its process does not take them along."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, SnapshotPoint], RngStates] = {}
        self._data_start: RngStates | None = None
        self._merged: tuple[dict[str, bytes], dict[str, bytes], bytes, dict[str, bytes]] = ({}, {}, NOTHING, {})

    def forget(self) -> None:
        """Forget the streams in memory, because storage gives the state."""
        self.states = {}
        self._data_start = None

    def capture(
        self,
        step: int,
        loss: float | None,
        stage: SnapshotPoint,
        own: Mapping[str, Any] | None,
        buffers: bytes = NOTHING,
    ) -> None:
        """Keep the streams now as those at ``stage`` after ``step``, with ``own`` and the record of ``buffers``.

        Without a ``loss``, the one kept with the step stays; ``own`` None: too large to keep.
        """
        if loss is None:
            committed = self.states.get((step, SnapshotPoint.COMMITTED))
            known = {SnapshotPoint.COMMITTED: committed} if committed is not None else self.at(step)
            if known:
                loss = next(iter(known.values())).loss
        self.keep(step, self._with_declared(RngStates.capture(loss, stage, own), buffers))

    def _with_declared(self, states: RngStates, buffers: bytes) -> RngStates:
        """Add declared state and buffers to random streams; the same dictionary comes of the same three."""
        declared = declared_state.take()
        if not declared and buffers == NOTHING:
            return states
        streams, known, record, merged = self._merged
        if streams is not states.streams or known is not declared or record is not buffers:
            merged = _with_buffers({**states.streams, **declared}, buffers)
            self._merged = states.streams, declared, buffers, merged
        return dataclasses.replace(states, streams=merged)

    def amend(self, step: int, stage: SnapshotPoint, buffers: bytes) -> None:
        """Keep another record of the buffers with the streams at ``stage`` after ``step``, if these are kept."""
        if self.record_of_buffers(step, stage) not in (None, buffers):
            states = self.at(step)[stage]
            self.keep(step, dataclasses.replace(states, streams=_with_buffers(states.streams, buffers)))

    def record_of_buffers(self, step: int, stage: SnapshotPoint) -> bytes | None:
        """Return the record of this rank's buffers that was kept at a point; None: it is lost."""
        states = self.at(step).get(stage)
        return states.streams.get(_BUFFERS, NOTHING) if states is not None else None

    def have_moved(self, since: RngStates) -> tuple[bool, bool]:
        """Return whether random streams have moved, and whether declared state has changed."""
        declared = declared_state.part_of(since.streams)
        drawn = {name: each for name, each in since.streams.items() if name not in declared and name != _BUFFERS}
        return RngStates.capture().streams != drawn, declared_state.take() != declared

    def keep(self, step: int, states: RngStates) -> None:
        """Keep ``states`` as the streams at their stage after ``step``, and drop those of steps before the last."""
        known, stage = self.states, states.stage
        begins = stage is SnapshotPoint.COMMITTED  # what followed when this step was made before is void
        kept = {key: each for key, each in known.items() if key[0] >= step - 1 and not (begins and key[0] == step)}
        board = _own_board()
        if not begins and board is not None and all(key[0] != step for key in kept):
            kept.update({(step, before): each for before, each in _found_on_board(board, step).items()})
        kept[step, stage] = states
        self.states = kept  # one assignment: an interruption leaves the old or the new
        if board is not None:
            _put_on_board(board, step, states)

    def at(self, step: int) -> dict[SnapshotPoint, RngStates]:
        """Return the streams after ``step`` by stage, from memory or, in a new process, from the board."""
        known = {key[1]: states for key, states in self.states.items() if key[0] == step}
        if known:
            return known
        board = _own_board()
        return _found_on_board(board, step) if board is not None else {}

    def digests(self, step: int) -> dict[str, str] | None:
        """Return digests of declared state, and of Python's, NumPy's and torch's streams, after ``step``."""
        states = self.at(step).get(SnapshotPoint.COMMITTED)
        if states is None:
            return None
        drawn = {name: each for name, each in states.streams.items() if name in _LIBRARIES}
        digests = {f"{RANDOM_STREAM} {name}": digest_value(each) for name, each in drawn.items()}
        return {**digests, **declared_state.digests(states.streams)}

    def newest(self, step: int) -> RngStates | None:
        known = self.at(step)
        return known[max(known)] if known else None

    def restore(self, step: int, stage: SnapshotPoint) -> bool:
        """Put back the streams at ``stage`` after ``step``; return False if they are not known."""
        states = self.at(step).get(stage)
        if states is not None:
            declared_state.put(states.streams)
            states.restore()
        return states is not None

    def known(self) -> tuple[tuple[int, int], ...]:
        """Return the newest steps and stages whose streams are known."""
        board = _own_board()
        steps = {step for step, _ in self.states}
        if not steps and board is not None:
            committed = board.read().committed
            steps = {committed - 1, committed, committed + 1}
        known = {step: self.at(step) for step in sorted(steps) if step >= 0}
        return tuple((step, int(stage)) for step, streams in known.items() for stage in sorted(streams))

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep ``streams``, from which a new iterator over the training data draws its order, also on the board."""
        self._data_start = streams
        board = _own_board()
        if board is not None:
            board.put_snapshot(0, streams.to_bytes(), series=DATA_SERIES)

    def data_start(self) -> RngStates | None:
        """Return the streams as they were when the newest iterator over the training data began."""
        board = _own_board()
        if self._data_start is None and board is not None:
            kept = board.snapshot(0, series=DATA_SERIES)
            self._data_start = RngStates.from_bytes(kept) if kept else None
        return self._data_start


def _with_buffers(streams: dict[str, bytes], record: bytes) -> dict[str, bytes]:
    rest = {name: each for name, each in streams.items() if name != _BUFFERS}
    return rest if record == NOTHING else {**rest, _BUFFERS: record}


# --- On the board, from which a process that takes the rank's place gets them -------------------------------------


def _put_on_board(board: Board, step: int, states: RngStates) -> None:
    """Keep ``states`` as those at their point after ``step``; streams that have not moved are not copied again."""
    if states.stage is SnapshotPoint.COMMITTED:  # what followed the step when it was made before is void
        for later in _LATER:
            board.drop_snapshot(step, _STREAM_SERIES[later])
    head, parts = states.to_parts()
    board.put_snapshot(step, head, _STREAM_SERIES[states.stage], parts)


def _found_on_board(board: Board, step: int) -> dict[SnapshotPoint, RngStates]:
    found: dict[SnapshotPoint, RngStates] = {}
    for point, series in _STREAM_SERIES.items():
        snapshot = board.snapshot(step, series)
        if snapshot is not None:
            with suppress(ValueError):  # the process ended while it was written
                found[point] = RngStates.from_bytes(snapshot)
    return found


_SERIES = Board.SERIES - 1  # the board's series for another rank's snapshots


@dataclass(frozen=True)
class Carried:
    """What only a rank has, on its way to another process: streams by step, and those of its data's order."""

    streams: Sequence[tuple[int, RngStates]] = ()
    data_start: RngStates | None = None

    def to_plain(self) -> list[Any]:
        start = self.data_start.to_bytes() if self.data_start is not None else None
        return [[[step, states.to_bytes()] for step, states in self.streams], start]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Carried:
        """Return what :meth:`to_plain` encoded; raise ``ValueError`` if a stream is damaged."""
        streams, start = plain
        states = [(step, RngStates.from_bytes(each)) for step, each in streams]
        return cls(states, None if start is None else RngStates.from_bytes(start))

    def keep_in(self, own: RankLocalState) -> None:
        for step, states in sorted(self.streams, key=lambda each: (each[0], each[1].stage)):
            own.streams.keep(step, states)
        if self.data_start is not None:
            own.streams.keep_data_start(self.data_start)


class _OwnReplicas:
    """Keeps what is another rank's own, and has this rank's kept ``jump`` ranks further on.

    None: on the next node, if there is one and the launcher replaces nodes. 0: nowhere.
    """

    def __init__(self, jump: int | None = None) -> None:
        if jump is not None and jump < 0:
            raise ValueError(f"rng_replication_jump must not be negative, but is {jump}")
        self._asked = jump
        self._jump: int | None = None
        self._kept: dict[int, bytes] = {}

    @property
    def jump(self) -> int:
        """How many ranks further on this job keeps a rank's streams; 0: nowhere."""
        if self._jump is None:  # computed once: it is needed at every step, and always the same in a job
            world = dist.get_world_size()
            jump = self._asked
            if jump is None:
                jump = int(os.environ.get(LOCAL_WORLD_SIZE_ENV, world)) if _own_board() is not None else 0
            self._jump = jump % world
        return self._jump

    def exchange(self, step: int, streams: Callable[[], bytes]) -> None:
        """Send this rank's streams after ``step``, and keep another's. Collective, before the vote on it."""
        jump = self.jump
        if jump == 0:
            return
        payload = streams()
        device = wire_device()
        size = torch.zeros(1, dtype=torch.int64, device=device)
        _pass_on(torch.tensor([len(payload)], dtype=torch.int64, device=device), size, jump)
        length = int(size.item())
        if not 0 <= length <= MAX_BYTES:
            raise ValueError(f"random streams of {length} bytes are over {MAX_BYTES}")
        theirs = torch.empty(length, dtype=torch.uint8, device=device)
        _pass_on(to_tensor(payload, device), theirs, jump)
        self._keep(step, to_bytes(theirs))

    def find(self, step: int, own: bool) -> tuple[bytes | None, list[int]]:
        """Give ranks that lack their streams after ``step`` the kept copy; return mine, who lacks. Collective."""
        rank, world, jump = dist.get_rank(), dist.get_world_size(), self.jump
        kept = self._of(step)
        answers = all_gather_json({"own": own, "keeps": jump > 0 and kept is not None})
        lacking = [each for each in range(world) if not answers[each]["own"]]
        lost = [each for each in lacking if not answers[(each + jump) % world]["keeps"]]
        given: bytes | None = None
        if not lost:
            for each in lacking:  # in the same order on all ranks, so that a rank may both give and take
                keeper = (each + jump) % world
                if rank == keeper and kept is not None:
                    send_bytes(kept, each)
                elif rank == each:
                    given = receive_bytes(keeper)
        return given, lost

    def kept(self) -> dict[int, bytes]:
        board = _own_board()
        if self._kept or board is None or self.jump == 0:
            return dict(self._kept)
        committed = board.read().committed
        found = {step: board.snapshot(step, series=_SERIES) for step in (committed, committed + 1) if step >= 0}
        return {step: payload for step, payload in found.items() if payload is not None}

    def _keep(self, step: int, payload: bytes) -> None:
        before = {step - 1: self._kept[step - 1]} if step - 1 in self._kept else {}
        self._kept = {**before, step: payload}  # one assignment: an interruption leaves the old or the new
        board = _own_board()
        if board is not None:
            board.put_snapshot(step, payload, series=_SERIES)

    def _of(self, step: int) -> bytes | None:
        board = _own_board()
        return self._kept.get(step) or (board.snapshot(step, series=_SERIES) if board is not None else None)


def _pass_on(mine: torch.Tensor, theirs: torch.Tensor, jump: int) -> None:
    """Send ``mine`` to the rank ``jump`` places further on, and receive ``theirs`` from the rank as far back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange([(dist.isend, mine, (rank + jump) % world), (dist.irecv, theirs, (rank - jump) % world)])


class RankLocalState:
    """Keeps what is this rank's own (a copy ``replication_jump`` ranks further on), and gives it back."""

    def __init__(self, replication_jump: int | None) -> None:
        self.streams = _OwnStreams()
        self.buffers = _OwnBuffers()
        self.replicas = _OwnReplicas(replication_jump)

    def forget(self) -> None:
        self.streams.forget()
        self.buffers.forget()

    def replicate(self, step: int, state: TrainingState | None) -> None:
        """Have what is this rank's own after ``step`` kept on another node, too, if there is one. Collective."""
        if state is not None and not step & (step - 1):  # at ever fewer steps
            self.buffers.compare(state.holders(state.buffers.take()))
        self.replicas.exchange(step, lambda: self._record(step, self.streams.at(step)[SnapshotPoint.COMMITTED]))

    def _record(self, step: int, states: RngStates) -> bytes:
        return state_tree.dumps(Carried([(step, states)], self.streams.data_start()).to_plain())

    def kept_at(self, step: int, stage: SnapshotPoint) -> Mapping[str, Any] | None:
        """Return what was kept with the streams as ``own`` at ``stage`` after ``step``; None: it is lost."""
        states = self.streams.at(step).get(stage)
        return states.own if states is not None else None

    def begin_buffers(self, state: TrainingState) -> None:
        """Find out which buffers are a rank's own; ``UnrecoverableError`` if ranks contradict. Collective."""
        board, buffers = _own_board(), state.buffers.take()
        require_agreement(state, buffers)
        if board is not None:
            board.set_shard(min(state.holders()))
        self.buffers.begin(buffers, state.holders(buffers))

    def keep_buffers(self, step: int, stage: SnapshotPoint, buffers: Mapping[Key, torch.Tensor]) -> None:
        """Keep this rank's buffers, if they may be its own, with the streams of a point that are kept already."""
        self.buffers.keep(buffers)
        self.streams.amend(step, stage, self.buffers.record)

    def kept_streams(self) -> list[list[int]]:
        """Return the newest steps and stages for which this rank keeps another rank's streams."""
        return [
            [step, int(states.stage)]
            for payload in self.replicas.kept().values()
            for step, states in Carried.from_plain(state_tree.loads(payload)).streams
        ]

    def find_streams(self, target: int, stage: SnapshotPoint) -> list[int]:
        """Give every rank its own streams after ``target``; return the ranks whose are nowhere. Collective."""
        if target == 0:
            return []
        known = self.streams.at(target)
        given, lost = self.replicas.find(target, bool(known))
        if given is not None:
            Carried.from_plain(state_tree.loads(given)).keep_in(self)
            known = self.streams.at(target)
        if known and not lost:  # on all ranks or on none: the rank that keeps them may be new
            newest = known.get(stage, known[min(known)])
            self.replicas.exchange(target, lambda: self._record(target, newest))
        return lost

    def find_lost_buffers(
        self,
        moment: tuple[int, SnapshotPoint],
        held: Mapping[Key, torch.Tensor] | None,
        refills: Mapping[int, Sequence[int]],
        objects: Mapping[str, Any],
    ) -> dict[int, str]:
        """Return the ranks that cannot be given their own buffers, and why. Collective.

        ``held`` and ``objects``: what this rank has in memory; ``refills``: the sources of buffers by rank to fill.
        """
        if not refills:
            return {}
        record = self.streams.record_of_buffers(*moment)
        is_filled = dist.get_rank() in refills
        theirs = None if is_filled else held
        updated = objects.get(UPDATED_BUFFERS, ())
        return self.buffers.lost(theirs, record, refills, is_filled and held is not None, updated)

    def put_buffers(
        self,
        state: TrainingState,
        moment: tuple[int, SnapshotPoint],
        held: Mapping[Key, torch.Tensor] | None,
        objects: Mapping[str, Any],
        is_filled: bool,
    ) -> None:
        """Put back own buffers where a peer filled the rank; kept ones are older than an update of theirs."""
        record = self.streams.record_of_buffers(*moment) or NOTHING
        if is_filled:
            updated = objects.get(UPDATED_BUFFERS, ())
            mine = held if held is not None else _decode(record)
            own = {key: buffer for key, buffer in mine.items() if key not in updated}
            places = state.allocate([TensorEntry.of(key, buffer) for key, buffer in own.items()])
            with torch.no_grad():
                for key, buffer in own.items():
                    places[key].copy_(buffer)
        self.buffers.begun_with(state.buffers.take(), record)


class _Fits:
    """Counts the fits of a block: ``number`` (from 1), what ended ones left, and how many steps precede."""

    def __init__(self) -> None:
        self.number = self.offset = 0
        self.finished: dict[int, dict[str, Any]] = {}

    def begin(self, committed: int) -> None:
        """Begin a fit of the block, after ``committed``. Its steps are counted on from those before it."""
        self.number += 1
        self.offset = committed + 1 if self.number > 1 else 0

    def finish(self, objects: dict[str, Any]) -> None:
        """Record that the fit under way is over, on all ranks, and in which non-tensor state."""
        self.finished = {**self.finished, self.number: objects}

    def share_finished(self) -> dict[str, Any] | None:
        """Return the non-tensor state in which the fit ended before the fault, if any rank has it. Collective."""
        objects = self.finished.get(self.number)
        have = all_gather_json(objects is not None)
        if not any(have):
            return None
        giver = have.index(True)
        if dist.get_rank() == giver:
            payload = state_tree.dumps(objects)
            for rank, has in enumerate(have):
                if not has:
                    send_bytes(payload, rank)
        elif objects is None:
            objects = state_tree.loads(receive_bytes(giver))
        assert objects is not None
        self.finish(objects)
        return objects


class RankLocalKeeper(ABC):
    """Keeps this rank's streams and buffers while it trains; ``resumed_at``: point of the last recovery."""

    def __init__(self, replication_jump: int | None) -> None:
        self.own = RankLocalState(replication_jump)
        self._fallback_lock = ParameterUpdateLock()
        self.fits = _Fits()
        self.resumed_at: tuple[int, SnapshotPoint] | None = None

    @property
    def parameter_update_lock(self) -> ParameterUpdateLock:
        """The lock around this rank's optimizer update."""
        call = active_call_wrapper()
        return call.parameter_update_lock if call is not None else self._fallback_lock

    @property
    def rng_states(self) -> dict[tuple[int, SnapshotPoint], RngStates] | None:
        """This rank's random streams at the points after its newest two steps; None: it has none."""
        return self.own.streams.states or None

    @rng_states.setter
    def rng_states(self, states: dict[tuple[int, SnapshotPoint], RngStates] | None) -> None:
        self.own.streams.states = states or {}

    @abstractmethod
    def replicate_rng_states(self, step: int) -> None:
        """Have what is this rank's own after ``step`` kept on another node, too, if there is one. Collective."""

    # --- while training ---------------------------------------------------------------------------------------

    def store_rng_states(
        self,
        step: int | None = None,
        loss: float | None = None,
        stage: SnapshotPoint = SnapshotPoint.COMMITTED,
        own: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        """Keep this rank's random streams as those after ``step`` (the committed one), here and on its board.

        ``own`` is what else this rank alone has then, as plain data that nobody changes; None: it is too large to
        be kept.
        """
        step = self.parameter_update_lock.committed if step is None else step
        buffers = self.own.buffers.record if stage is not SnapshotPoint.ACCUMULATED else NOTHING
        self.own.streams.capture(step, loss, stage, own, buffers)

    def load_rng_states(self, step: int | None = None) -> bool:
        """Put back the newest streams after ``step`` (the committed one); return whether there are any."""
        step = self.parameter_update_lock.committed if step is None else step
        states = self.own.streams.newest(step)
        if states is not None:
            states.restore()
        return states is not None

    # --- when training resumes ---------------------------------------------------------------------------------

    def restore_streams(self) -> None:
        """Put back the random streams that this rank had at the point that was resumed at.

        Raises:
            RuntimeError: the streams are not known, and it is not the start of a fit.
        """
        if self.resumed_at is None:
            return
        step, stage = self.resumed_at
        if (
            not self.own.streams.restore(step, stage)
            and step > self.fits.offset
            and stage is not SnapshotPoint.LOADED
        ):
            raise RuntimeError(f"the random streams of this rank after step {step} ({stage.name}) are not known")
