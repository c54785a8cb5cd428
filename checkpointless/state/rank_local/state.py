"""What a rank holds by itself and no peer can give: its random streams and its modules' buffers.

Copies on another node of what is a rank's own, for when a node is lost with its boards.

Once a rank has drawn from its random streams, no peer has them by construction, and they cannot be rebuilt from
the model. This also holds for the streams that the order of its data was drawn from, and for buffers of its
modules. So before each optimizer update, every rank sends them to the rank ``jump`` places further on. That rank
keeps those of the two newest steps in its memory and on its board: 10 to 50 kB per rank and step, and the buffers.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess import ParameterUpdateLock
from checkpointless.inprocess.wrap import own_board
from checkpointless.launcher.protocol.board import NO_STEP, Board
from checkpointless.state.port import UPDATED_BUFFERS, SnapshotPoint, TrainingState, holders_of
from checkpointless.state.rank_local.agreement import require_agreement
from checkpointless.state.rank_local.buffers import NOTHING, OwnBuffers, decode
from checkpointless.state.rank_local.streams import OwnStreams
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.system.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.transfer.exchange import (
    MAX_BYTES,
    all_gather_json,
    receive_bytes,
    send_bytes,
    to_bytes,
    to_tensor,
    wire_device,
)
from checkpointless.transfer.tensor_entry import Key, TensorEntry

_SERIES = Board.SERIES - 1  # the board's series for another rank's snapshots; a large one


@dataclass(frozen=True)
class _RankLocalRecord:
    """What is a rank's own at a point, as bytes for another node to keep.

    Attributes:
        data_start: the streams that the order of its data was drawn from; None if there are none.
        buffers: the record of its buffers; None if there is none.
    """

    streams: bytes
    data_start: bytes | None
    buffers: bytes | None

    def to_bytes(self) -> bytes:
        """Encode as plain data."""
        return state_tree.dumps((self.streams, self.data_start, self.buffers))

    @classmethod
    def from_bytes(cls, data: bytes) -> _RankLocalRecord:
        """Decode what :meth:`to_bytes` made.

        Raises:
            ValueError: ``data`` was not made by :meth:`to_bytes`.
        """
        streams, data_start, buffers = state_tree.loads(data)
        return cls(streams, data_start, buffers)


class _OwnReplicas:
    """Keeps what is another rank's own, and has this rank's kept.

    Args:
        jump: how many ranks further on a rank's streams are kept. None: on the next node, as ``LOCAL_WORLD_SIZE``
            says; but nowhere in a job on one node, whose boards are lost only with the whole job, or under another
            launcher than ours, which does not replace a node. 0: nowhere.

    Raises:
        ValueError: ``jump`` is negative.
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
                jump = int(os.environ.get(LOCAL_WORLD_SIZE_ENV, world)) if own_board() is not None else 0
            self._jump = jump % world
        return self._jump

    def exchange(self, step: int, streams: Callable[[], bytes]) -> None:
        """Send this rank's streams after ``step`` to the rank that keeps them, and keep another rank's. Collective.

        A rank that returns knows that its streams are kept only when the other ranks have returned, too: call this
        method before the vote on the step.

        Args:
            streams: makes the streams' bytes; not called if they are kept nowhere.

        Raises:
            ValueError: the streams to be kept claim to be larger than 64 MiB.
        """
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
        """Give every rank that lacks its streams after ``step`` the copy that another rank keeps. Collective.

        Returns:
            The streams that this rank was given, if it lacked its own; and the ranks whose streams are nowhere.
        """
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
        """Return the streams of another rank that this rank keeps, by step."""
        board = own_board()
        if self._kept or board is None or self.jump == 0:
            return dict(self._kept)
        committed = board.read().committed
        found = {step: board.snapshot(step, series=_SERIES) for step in (committed, committed + 1) if step >= 0}
        return {step: payload for step, payload in found.items() if payload is not None}

    def _keep(self, step: int, payload: bytes) -> None:
        before = {step - 1: self._kept[step - 1]} if step - 1 in self._kept else {}
        self._kept = {**before, step: payload}  # one assignment: an interruption leaves the old or the new
        board = own_board()
        if board is not None:
            board.put_snapshot(step, payload, series=_SERIES)

    def _of(self, step: int) -> bytes | None:
        """Return the other rank's streams after ``step``, if this rank keeps them."""
        board = own_board()
        return self._kept.get(step) or (board.snapshot(step, series=_SERIES) if board is not None else None)


def _pass_on(mine: torch.Tensor, theirs: torch.Tensor, jump: int) -> None:
    """Send ``mine`` to the rank ``jump`` places further on, and receive ``theirs`` from the rank as far back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    works: list[Any] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + jump) % world),
            dist.P2POp(dist.irecv, theirs, (rank - jump) % world),
        ]
    )
    for work in works:
        work.wait()


class RankLocalState:
    """Keeps what is this rank's own, and gives it back when peers have given the rest.

    Args:
        replication_jump: how many ranks further on a copy is kept; see
            :class:`~checkpointless.state.rank_local.state._OwnReplicas`.

    Raises:
        ValueError: ``replication_jump`` is negative.
    """

    def __init__(self, replication_jump: int | None) -> None:
        self.streams = OwnStreams()
        self.buffers = OwnBuffers()
        self.replicas = _OwnReplicas(replication_jump)

    def forget(self) -> None:
        """Forget what is in memory, because storage gives the state."""
        self.streams.forget()
        self.buffers.forget()

    def replicate(self, step: int, state: TrainingState | None) -> None:
        """Have what is this rank's own after ``step`` kept on another node, too, if there is one. Collective.

        Args:
            state: the state, which knows whose buffers are to be the same; None: nothing has been trained yet.
        """
        if state is not None and not step & (step - 1):  # at ever fewer steps
            self.buffers.compare(step, holders_of(state, state.buffers.take()))
        if self.replicas.jump == 0:
            return
        self.replicas.exchange(step, lambda: self._record(step, self.streams.at(step)[SnapshotPoint.COMMITTED]))

    def _record(self, step: int, states: RngStates) -> bytes:
        """Return what is this rank's own at the point of ``states``, for another node to keep."""
        record = self.buffers.record(step, states.stage, own_board())
        start = self.streams.data_start()
        return _RankLocalRecord(
            states.to_bytes(), start.to_bytes() if start is not None else None, record
        ).to_bytes()

    def kept_at(self, step: int, stage: SnapshotPoint) -> Mapping[str, Any] | None:
        """Return what was kept with the streams as ``own`` at ``stage`` after ``step``; None: it is lost."""
        states = self.streams.at(step).get(stage)
        return states.own if states is not None else None

    def begin_buffers(self, state: TrainingState) -> None:
        """Begin a training: find out which buffers are a rank's own. Collective.

        Raises:
            UnrecoverableError: the ranks contradict each other about who holds the same, or it is not the same.
        """
        board, buffers = own_board(), state.buffers.take()
        require_agreement(state, buffers)
        if board is not None:
            board.set_shard(min(holders_of(state)))
            board.mark_buffers(NO_STEP, 0)
        self.buffers.begin(buffers, holders_of(state, buffers))

    def keep_buffers(self, step: int, stage: SnapshotPoint, buffers: Mapping[Key, torch.Tensor]) -> None:
        """Keep this rank's buffers as those after ``step``, here and on its board, if they may be its own.

        Call this before the streams are kept, so that a rank that has the streams of a point has its buffers.
        """
        if buffers or not self.buffers.are_settled:
            self.buffers.keep(step, stage, buffers, own_board())

    def kept_streams(self) -> list[list[int]]:
        """Return the newest steps and stages for which this rank keeps another rank's streams."""
        return [
            [step, int(RngStates.from_bytes(_RankLocalRecord.from_bytes(payload).streams).stage)]
            for step, payload in self.replicas.kept().items()
        ]

    def find_streams(self, target: int, stage: SnapshotPoint) -> list[int]:
        """Give every rank its own random streams after ``target``, for when the loop resumes. Collective.

        What another node keeps comes with its buffers and with what the order of its data was drawn from.

        Returns:
            The ranks whose streams are nowhere: they would train on with different streams. No rank at step 0,
            where the streams begin.
        """
        if target == 0:
            return []
        known = self.streams.at(target)
        given, lost = self.replicas.find(target, bool(known))
        if given is not None:
            kept = _RankLocalRecord.from_bytes(given)
            states = RngStates.from_bytes(kept.streams)
            if kept.data_start is not None:
                self.streams.keep_data_start(RngStates.from_bytes(kept.data_start))
            if kept.buffers is not None:
                self.buffers.keep_record(target, states.stage, kept.buffers, own_board())
            self.streams.keep(target, states)
            known = {states.stage: states}
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

        Args:
            held: this rank's buffers at that point, if it has them in memory.
            refills: maps each rank to fill to the sources of its buffers.
            objects: the non-tensor state at that point, if this rank has it in memory.
        """
        if not refills:
            return {}
        record = self.buffers.record(*moment, own_board())
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
    ) -> None:
        """Put back this rank's own buffers, where they were kept, after a peer has filled the rank.

        What was kept may be from before the update of the step, because the rank was lost in it. The buffers that
        an update writes to stay as the peer gave them.

        Args:
            held: this rank's buffers at that point, if it has them in memory.
        """
        updated = objects.get(UPDATED_BUFFERS, ())
        if held is None:
            record = self.buffers.record(*moment, own_board()) or NOTHING
            held = decode(record)
            if record == NOTHING:
                self.buffers.begun_with(state.buffers.take())
        own = {key: buffer for key, buffer in held.items() if key not in updated}
        places = state.allocate([TensorEntry.of(key, buffer) for key, buffer in own.items()])
        with torch.no_grad():
            for key, buffer in own.items():
                places[key].copy_(buffer)


class RankLocalKeeper(ABC):
    """Keeps this rank's random streams and buffers while it trains, and puts them back when training resumes.

    Attributes:
        offset: how many steps of the job precede the fit that is under way: steps are counted over all fits.
        resumed_at: the step and the stage that the last recovery resumed at; None if there was none.
    """

    def __init__(self, own: RankLocalState) -> None:
        self.own = own
        self.offset = 0
        self.resumed_at: tuple[int, SnapshotPoint] | None = None

    @property
    @abstractmethod
    def parameter_update_lock(self) -> ParameterUpdateLock:
        """The lock around this rank's optimizer update."""

    @property
    def rng_states(self) -> dict[tuple[int, SnapshotPoint], RngStates] | None:
        """This rank's random streams at the points after its newest two steps; None: it has none."""
        return self.own.streams.states or None

    @rng_states.setter
    def rng_states(self, states: dict[tuple[int, SnapshotPoint], RngStates] | None) -> None:
        self.own.streams.states = states

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
        """Keep this rank's random streams as those after ``step``, here and on its board.

        Args:
            step: the optimizer step; default: the committed step.
            own: what else this rank alone has at that point, as plain data that nobody changes; it is kept with
                the streams. None: it is too large to be kept.
        """
        step = self.parameter_update_lock.committed if step is None else step
        self.own.streams.capture(step, loss, stage, own)

    def load_rng_states(self, step: int | None = None) -> bool:
        """Put back the newest streams after ``step`` (default: the step that was resumed at).

        Returns:
            False if this rank has no streams for that step.
        """
        step = self.parameter_update_lock.committed if step is None else step
        states = self.own.streams.newest(step)
        if states is not None:
            states.restore()
        return states is not None

    # --- when training resumes ---------------------------------------------------------------------------------

    def restore_streams(self, stage: SnapshotPoint | None = None) -> None:
        """Put back the random streams that this rank had after the step that was resumed at.

        Args:
            stage: the point after that step; default: the point that was resumed at.

        Raises:
            RuntimeError: the streams are not known, and it is not the start of a fit.
        """
        if self.resumed_at is None:
            return
        step, resumed = self.resumed_at
        stage = resumed if stage is None else stage
        if not self.own.streams.restore(step, stage) and step > self.offset and stage is not SnapshotPoint.LOADED:
            raise RuntimeError(f"the random streams of this rank after step {step} ({stage.name}) are not known")
