"""Provide a training state without a training: a parameter, its momentum and a buffer, in this process alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from checkpointless.recovery import CheckpointManager
from checkpointless.state.journal import FrontEnd, StepJournal
from checkpointless.state.port import SnapshotPoint, StepSnapshot, TrainingState
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry

WEIGHT: Key = ("model", 0, "weight")
BUFFER: Key = ("model", 0, "buffer")
MOMENTUM: Key = ("optimizer", 0, 0, 0, "momentum")


class MadeUpState(TrainingState):
    """Stands in for the state of a training."""

    def __init__(self, step: int, adoptable: Sequence[Key] = ()) -> None:
        self.step = step
        self.applied = 0
        self.fails = False
        self.adopted: list[Key] = []
        self.all_holders: Group = (0, 1)
        self.held_by: dict[Key, Group] = {}  # of the tensors that others hold
        self._adoptable = set(adoptable)
        self.present = {key: torch.full((1,), float(step)) for key in (WEIGHT, BUFFER, MOMENTUM)}
        self.buffers: Any = SimpleNamespace(take=lambda: {BUFFER: self.present[BUFFER].clone()})

    def replica_groups(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        found: dict[Group, list[Key]] = {}
        for key in keys:
            found.setdefault(self.held_by.get(key, self.all_holders), []).append(key)
        return found

    def tensors(self) -> dict[Key, torch.Tensor]:
        return dict(self.present)

    def shard(self) -> dict[Key, torch.Tensor]:
        return {MOMENTUM: self.present[MOMENTUM]}

    def capture(self) -> Callable[[], dict[str, Any]]:
        return dict

    def restore(self, captured: Mapping[str, Any]) -> None:
        pass

    def allocate(
        self, entries: Sequence[TensorEntry], held: Mapping[Key, torch.Tensor] = MappingProxyType({})
    ) -> Mapping[Key, torch.Tensor]:
        found = held.keys() & self._adoptable
        self.present.update({key: held[key] for key in found})
        self.adopted += sorted(found, key=str)
        return self.present

    def finish_update(self) -> None:
        if self.fails:
            raise RuntimeError("interrupted")
        self.applied += 1


class MadeUpJournal(StepJournal):
    """Has snapshots of every step."""

    def __init__(self, state: MadeUpState) -> None:
        super().__init__(state, CheckpointManager(), FrontEnd())

    def snapshots(self, step: int) -> Mapping[SnapshotPoint, StepSnapshot]:
        def snapshot(point: SnapshotPoint) -> StepSnapshot:
            gone: Key = ("model", 0, "gone")
            buffers = {BUFFER: torch.full((1,), 10.0 * step + point), gone: torch.ones(1)}
            return StepSnapshot({"step": step, "stage": int(point)}, buffers)

        return {point: snapshot(point) for point in (SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED)}

    def buffers(self, step: int) -> Mapping[SnapshotPoint, Mapping[Key, torch.Tensor]]:
        return {SnapshotPoint.COMMITTED: {BUFFER: torch.full((1,), 10.0 * step)}}
