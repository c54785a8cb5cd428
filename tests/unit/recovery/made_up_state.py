"""Provide a training state without a training: a parameter, its momentum and a buffer, in this process alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from checkpointless.state.snapshot import SnapshotPoint, StepSnapshot
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry

WEIGHT: Key = ("model", 0, "weight")
BUFFER: Key = ("model", 0, "buffer")
MOMENTUM: Key = ("optimizer", 0, 0, 0, "momentum")


class MadeUpState:
    """Stands in for a :class:`checkpointless.state.live_state.LiveState`.

    Args:
        step: the step that it is at.
        adoptable: keys of tensors that need no copy to be put in place.
    """

    def __init__(self, step: int, adoptable: Sequence[Key] = ()) -> None:
        self.step = step
        self.applied = 0
        self.fails = False
        self.adopted: list[Key] = []
        self.all_holders: Group = (0, 1)
        self.holders: dict[Key, Group] = {}  # of the tensors that others hold
        self._adoptable = set(adoptable)
        self.present = {key: torch.full((1,), float(step)) for key in (WEIGHT, BUFFER, MOMENTUM)}

    def group(self) -> tuple[int, ...]:
        return self.all_holders

    def parts(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        found: dict[Group, list[Key]] = {}
        for key in keys:
            found.setdefault(self.holders.get(key, self.all_holders), []).append(key)
        return found

    def are_reduced(self) -> bool:
        return True

    def join_objects(self, objects: Mapping[Group, Any]) -> Any:
        return {"joined": dict(objects)}

    def tensors(self) -> dict[Key, torch.Tensor]:
        return dict(self.present)

    def essentials(self) -> dict[Key, torch.Tensor]:
        return self.tensors()

    def shard(self) -> dict[Key, torch.Tensor]:
        return {MOMENTUM: self.present[MOMENTUM]}

    def moments(self, step: int) -> Mapping[SnapshotPoint, StepSnapshot]:
        def moment(stage: SnapshotPoint) -> StepSnapshot:
            gone: Key = ("model", 0, "gone")
            buffers = {BUFFER: torch.full((1,), 10.0 * step + stage), gone: torch.ones(1)}
            return StepSnapshot({"step": step, "stage": int(stage)}, buffers)

        return {stage: moment(stage) for stage in (SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED)}

    def own_buffers(self, step: int) -> Mapping[SnapshotPoint, Mapping[Key, torch.Tensor]]:
        return {SnapshotPoint.COMMITTED: {BUFFER: torch.full((1,), 10.0 * step)}}

    def copy_buffers(self) -> Mapping[Key, torch.Tensor]:
        return {BUFFER: self.present[BUFFER].clone()}

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def resumed(self, step: int, stage: SnapshotPoint, objects: dict[str, Any]) -> None:
        self.step = step

    def apply_held_update(self) -> None:
        if self.fails:
            raise RuntimeError("interrupted")
        self.applied += 1

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        found = tensors.keys() & self._adoptable
        self.present.update({key: tensors[key] for key in found})
        self.adopted += sorted(found, key=str)
        return found

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        return self.present

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        pass

    def derive(self) -> None:
        pass
