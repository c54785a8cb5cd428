"""What a rank holds by itself and no peer can give: its random streams and its modules' buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess.context import own_board
from checkpointless.state.live_state import LiveState
from checkpointless.state.port import holders_of
from checkpointless.state.rank_local.buffers import NOTHING, OwnBuffers, decode
from checkpointless.state.rank_local.replicas import OwnRecord, OwnReplicas
from checkpointless.state.rank_local.streams import OwnStreams
from checkpointless.state.rng import RngStates
from checkpointless.state.snapshot import UPDATED_BUFFERS, SnapshotPoint
from checkpointless.transfer.tensor_entry import Key, TensorEntry


class OwnState:
    """Keeps what is this rank's own, and gives it back when peers have given the rest.

    Args:
        replication_jump: how many ranks further on a copy is kept; see
            :class:`~checkpointless.state.rank_local.replicas.OwnReplicas`.

    Raises:
        ValueError: ``replication_jump`` is negative.

    Attributes:
        streams: the rank's random streams.
        buffers: the rank's buffers.
        replicas: the copies on another node, of this rank's and another rank's.
    """

    def __init__(self, replication_jump: int | None) -> None:
        self.streams = OwnStreams()
        self.buffers = OwnBuffers()
        self.replicas = OwnReplicas(replication_jump)

    def forget(self) -> None:
        """Forget what is in memory, because storage gives the state."""
        self.streams.forget()
        self.buffers.forget()

    def replicate(self, step: int, live: LiveState | None) -> None:
        """Have what is this rank's own after ``step`` kept on another node, too, if there is one. Collective.

        Args:
            step: the optimizer step, whose streams and buffers have been kept.
            live: the state, which knows whose buffers are to be the same; None: nothing has been trained yet.
        """
        if live is not None and not step & (step - 1):  # at ever fewer steps
            self.buffers.compare(step, holders_of(live, live.copy_buffers()))
        if self.replicas.jump == 0:
            return
        self.replicas.exchange(step, lambda: self._record(step, self.streams.at(step)[SnapshotPoint.COMMITTED]))

    def _record(self, step: int, states: RngStates) -> bytes:
        """Return what is this rank's own at the moment of ``states``, for another node to keep."""
        record = self.buffers.record(step, states.stage, own_board())
        start = self.streams.data_start()
        return OwnRecord(states.to_bytes(), start.to_bytes() if start is not None else None, record).to_bytes()

    def kept_streams(self) -> list[list[int]]:
        """Return the newest steps and stages for which this rank keeps another rank's streams."""
        return [
            [step, int(RngStates.from_bytes(OwnRecord.from_bytes(payload).streams).stage)]
            for step, payload in self.replicas.kept().items()
        ]

    def find_streams(self, target: int, stage: SnapshotPoint) -> list[int]:
        """Give every rank its own random streams after ``target``, for when the loop resumes. Collective.

        What another node keeps comes with its buffers and with what the order of its data was drawn from.

        Args:
            target: the optimizer step that is resumed at.
            stage: the moment after it.

        Returns:
            The ranks whose streams are nowhere: they would train on with different streams. No rank at step 0,
            where the streams begin.
        """
        if target == 0:
            return []
        known = self.streams.at(target)
        given, lost = self.replicas.find(target, bool(known))
        if given is not None:
            kept = OwnRecord.from_bytes(given)
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
            moment: the step and the stage that is resumed at.
            held: this rank's buffers at that moment, if it has them in memory.
            refills: maps each rank to fill to the sources of its buffers.
            objects: the non-tensor state at that moment, if this rank has it in memory.
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
        live: LiveState,
        moment: tuple[int, SnapshotPoint],
        held: Mapping[Key, torch.Tensor] | None,
        objects: Mapping[str, Any],
    ) -> None:
        """Put back this rank's own buffers, where they were kept, after a peer has filled the rank.

        What was kept may be from before the update of the step, because the rank was lost in it. The buffers that
        an update writes to stay as the peer gave them.

        Args:
            live: the state that was filled.
            moment: the step and the stage that is resumed at.
            held: this rank's buffers at that moment, if it has them in memory.
            objects: the non-tensor state of that moment.
        """
        updated = objects.get(UPDATED_BUFFERS, ())
        if held is None:
            record = self.buffers.record(*moment, own_board()) or NOTHING
            held = decode(record)
            if record == NOTHING:
                self.buffers.begun_with(live.copy_buffers())
        own = {key: buffer for key, buffer in held.items() if key not in updated}
        places = live.room([TensorEntry.of(key, buffer) for key, buffer in own.items()])
        with torch.no_grad():
            for key, buffer in own.items():
                places[key].copy_(buffer)
