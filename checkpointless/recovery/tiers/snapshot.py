"""The whole state of one rank at a moment, as it is kept in tiers: plain values and tensors in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpointless.inprocess.context import own_board
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.held_state import HeldState
from checkpointless.recovery.live_state import LiveState
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.own.state import OwnState
from checkpointless.recovery.rng import RngStates
from checkpointless.replication.parts import Content
from checkpointless.serialization import state_tree
from checkpointless.serialization.tensor_memory import own_device
from checkpointless.transfer.tensor_entry import Key

_FORMAT = 1
#: The moment after a step at which copies are made: the first one, so that a finished step is soon copied.
COPIED_AT = Stage.COMMITTED


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank at a moment.

    Attributes:
        step: the optimizer step, counted over all fits of a block.
        stage: the moment after the step.
        fit: the fit of the block.
        offset: how many steps of the job precede that fit.
        tensors: the tensors from which, with all other ranks', model and optimizer can be made again.
        moment: the rest of the state.
        streams: the rank's random streams, and what else it alone has, as bytes.
        streams_before: the same of the last moment before the step; None: there is none.
        data_start: the streams that the order of its data was drawn from, as bytes; None: there are none.
        own_buffers: the record of its own buffers; None: there is none.
    """

    step: int
    stage: Stage
    fit: int
    offset: int
    tensors: Mapping[Key, torch.Tensor]
    moment: Moment
    streams: bytes
    streams_before: bytes | None = None
    data_start: bytes | None = None
    own_buffers: bytes | None = None

    def content(self) -> Content:
        """Return the snapshot as plain bytes and tensors, which are the same ones."""
        skeleton, inside = state_tree.split(self.moment.objects)
        tensors = [*self.tensors.values(), *self.moment.buffers.values(), *inside]
        plain: dict[str, Any] = {
            "format": _FORMAT,
            "step": self.step,
            "stage": int(self.stage),
            "fit": self.fit,
            "offset": self.offset,
            "tensors": list(self.tensors),
            "buffers": list(self.moment.buffers),
            "devices": [tensor.device.type for tensor in tensors],
            "objects": skeleton,
            "streams": self.streams,
            "streams_before": self.streams_before,
            "data_start": self.data_start,
            "own_buffers": self.own_buffers,
        }
        return Content(state_tree.dumps(plain), tuple(tensor.detach() for tensor in tensors))

    @classmethod
    def of(cls, content: Content) -> Snapshot:
        """Return the snapshot that :meth:`content` made, its tensors in host memory.

        Numbers, tensors without a dimension, are on the device on which they were: an optimizer looks at it.

        Raises:
            ValueError: it did not make this, or an earlier version did.
        """
        try:
            plain = state_tree.loads(content.structure)
            if plain["format"] != _FORMAT:
                raise ValueError(f"a copy of the state in format {plain['format']}, not {_FORMAT}")
            tensors = [
                tensor if tensor.dim() else tensor.to(own_device(kind))
                for tensor, kind in zip(content.tensors, plain["devices"], strict=True)
            ]
            keys, buffers = plain["tensors"], plain["buffers"]
            first, second = len(keys), len(keys) + len(buffers)
            return cls(
                plain["step"],
                Stage(plain["stage"]),
                plain["fit"],
                plain["offset"],
                dict(zip(keys, tensors[:first], strict=True)),
                Moment(
                    state_tree.join(plain["objects"], tensors[second:]),
                    dict(zip(buffers, tensors[first:second], strict=True)),
                ),
                plain["streams"],
                plain["streams_before"],
                plain["data_start"],
                plain["own_buffers"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no copy of a rank's state: {error!r}") from error


def snapshot_of(live: LiveState, own: OwnState, step: int, fit: int, offset: int) -> Snapshot | None:
    """Return the state of this rank after ``step``, its tensors as they live; None if it has no such moment.

    Args:
        live: the state, right after the update.
        own: what is this rank's own.
        step: the optimizer step.
        fit: the fit of the block, counted from 1.
        offset: how many steps of the job precede that fit.
    """
    moment, streams = live.moments(step).get(COPIED_AT), own.streams.at(step).get(COPIED_AT)
    if moment is None or streams is None:
        return None
    start = own.streams.data_start()
    before = own.streams.newest(step - 1)
    return Snapshot(
        step=step,
        stage=COPIED_AT,
        fit=fit,
        offset=offset,
        tensors=live.essentials(),
        moment=moment,
        streams=streams.to_bytes(),
        streams_before=before.to_bytes() if before is not None else None,
        data_start=start.to_bytes() if start is not None else None,
        own_buffers=own.buffers.record(step, COPIED_AT, own_board()),
    )


def hold_snapshot(snapshot: Snapshot, own: OwnState) -> HeldState:
    """Return the state of a copy as one that this rank holds, and keep what is the rank's own.

    Args:
        snapshot: the copy, which nobody else uses.
        own: what is this rank's own; its streams of other steps are forgotten, but not which buffers differ.
    """
    moment = snapshot.step, snapshot.stage
    own.streams.forget()
    if snapshot.streams_before is not None:
        own.streams.keep(snapshot.step - 1, RngStates.from_bytes(snapshot.streams_before))
    own.streams.keep(snapshot.step, RngStates.from_bytes(snapshot.streams))
    if snapshot.data_start is not None:
        own.streams.keep_data_start(RngStates.from_bytes(snapshot.data_start))
    if snapshot.own_buffers is not None:
        own.buffers.keep_record(*moment, snapshot.own_buffers, own_board())
    return HeldState(
        CommitState(snapshot.step, ready=False, torn=False),
        dict(snapshot.tensors),
        {snapshot.stage: snapshot.moment},
        fit=snapshot.fit,
        offset=snapshot.offset,
        buffers={moment: snapshot.moment.buffers},
    )
