"""The points after a step at which a rank can resume, and its state there but for parameters and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from checkpointless.transfer.tensor_entry import Key

#: In the objects of a point: the keys of the buffers that the update of a step writes to (in an optimizer's hook).
UPDATED_BUFFERS = "updated_buffers"


class SnapshotPoint(IntEnum):
    """How far a rank has come with what follows the update of a step. Ranks may differ by a few stages."""

    LOADED = -1  # the state was loaded, or is that of a new job, and the loop has not begun
    COMMITTED = 0  # the update is applied, and nothing that follows it has happened
    ENDED = 1  # a validation is due; what belongs to the end of the batch has happened: schedulers, hooks, metrics
    CHECKED = 2  # nothing is due: the next batch can be requested, or the epoch can end
    TURNED = 3  # the end of the epoch has happened, too
    ACCUMULATED = 4  # the next step has gradients of some batches; the replay of its last batch begins here


@dataclass(frozen=True)
class StepSnapshot:
    """A rank's state at one point, in addition to its parameters and what its optimizer owns.

    Attributes:
        objects: the non-tensor state, as plain data that nobody changes.
        buffers: copies of the modules' buffers by key, in the order of the state's tensors.
    """

    objects: dict[str, Any]
    buffers: Mapping[Key, torch.Tensor] = field(default_factory=dict)
