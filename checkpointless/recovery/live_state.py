"""What the recovery needs from the framework side, as small protocols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.transfer import Key, TensorEntry


class LiveState(Protocol):
    """A rank's training state where it lives: in the model, the optimizer and the trainer."""

    def group(self) -> tuple[int, ...]:
        """The global ranks that hold the same shard as this one, itself included."""

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Every tensor of the state, in the same order on every holder; the live storage, not copies.

        The tensors stay valid when the trainer that they belong to is dropped.
        """

    def shard(self) -> dict[Key, torch.Tensor]:
        """The tensors that this rank's optimizer update owns: what replicas must agree on."""

    def moments(self, step: int) -> Mapping[Stage, Moment]:
        """The state beside parameters and optimizer at every moment after ``step`` that can be resumed at.

        What the next step has changed by now, or what is half done, is in none of them.
        """

    def own_buffers(self, step: int) -> Mapping[Stage, Mapping[Key, torch.Tensor]]:
        """This rank's own buffers at every such moment, also if its update of ``step`` has failed or is to come."""

    def copy_buffers(self) -> Mapping[Key, torch.Tensor]:
        """Copies of this rank's buffers as they are now."""

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Parts of a moment's objects, by name, that may differ from rank to rank: no peer has a lost one."""

    def resumed(self, step: int, stage: Stage, objects: dict[str, Any]) -> None:
        """Tensors and objects are in place: those after ``step`` at ``stage``; :meth:`moments` has them now."""

    def apply_held_update(self) -> None:
        """Apply the optimizer update whose final gradients are held, without communication."""

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Put those of ``tensors`` in their place that can be there without a copy. Returns their keys."""

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Storage for ``entries``: existing tensors, or new ones put in their place in the state."""

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back the part of a moment's objects that belongs to model and optimizer."""

    def settle(self) -> None:
        """All shards of the job are at one step: derive what follows from them. Collective."""
