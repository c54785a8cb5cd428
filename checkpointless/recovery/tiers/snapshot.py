"""The whole state of one rank at a moment, as it is kept in tiers: plain values and tensors in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from checkpointless.local_checkpoint.content import Content
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.serialization import state_tree
from checkpointless.serialization.tensor_memory import own_device
from checkpointless.transfer.tensor_entry import Key

_FORMAT = 1


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
