"""What the recovery needs from the framework side, as a small protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from checkpointless.recovery.moment import Moment, Stage
from checkpointless.transfer.tensor_entry import Key, TensorEntry

DATA = "the state of the training data"  # prefix of the names of parts that must not come from a peer


class LiveState(Protocol):
    """A rank's training state where it lives: in the model, the optimizer and the trainer."""

    def group(self) -> tuple[int, ...]:
        """Return the global ranks that hold the same shard as this rank, this rank included."""

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return every tensor of the state, in the same order on every holder: the live storage, not copies.

        The tensors stay valid when the trainer that they belong to is dropped.
        """

    def shard(self) -> dict[Key, torch.Tensor]:
        """Return the tensors that this rank's optimizer update owns, on which replicas must agree."""

    def moments(self, step: int) -> Mapping[Stage, Moment]:
        """Return the state beside parameters and optimizer at every moment after ``step`` that can be resumed at.

        No moment contains what the next step has already changed, or what is half done.
        """

    def own_buffers(self, step: int) -> Mapping[Stage, Mapping[Key, torch.Tensor]]:
        """Return this rank's own buffers at every moment after ``step`` that can be resumed at.

        They are also known if this rank's update of ``step`` has failed or is to come.
        """

    def copy_buffers(self) -> Mapping[Key, torch.Tensor]:
        """Return copies of this rank's buffers as they are now."""

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parts of a moment's objects, by name, that may differ between ranks: no peer has a lost one."""

    def resumed(self, step: int, stage: Stage, objects: dict[str, Any]) -> None:
        """Note that tensors and objects after ``step`` at ``stage`` are in place; :meth:`moments` has them now."""

    def apply_held_update(self) -> None:
        """Apply the optimizer update whose final gradients are held, without communication."""

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Put in place those of ``tensors`` that need no copy, and return their keys."""

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Return storage for ``entries``: existing tensors, or new ones put in their place in the state."""

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back the part of a moment's objects that belongs to model and optimizer."""

    def settle(self) -> None:
        """Derive what follows from the shards, once all shards of the job are at one step. Collective."""
