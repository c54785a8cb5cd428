"""The tensors of a rank's state, whatever holds them: by key, with their storage and their replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from checkpointless.transfer.tensor_entry import Key, TensorEntry


class StateTensors(Protocol):
    """The tensors of one rank's model and optimizer.

    What moves, compares and holds tensors knows them only through this. A tensor is known by its key, which is the
    same on every rank that holds it. What stands under a key is plain storage on one device: of a tensor that is
    spread over ranks, the part of this rank (:func:`~checkpointless.serialization.tensor_memory.local_part`).

    :class:`~checkpointless.transfer.module_tensors.TrainingTensors` has keys and storage of torch modules and
    optimizers. Which ranks are replicas follows from the framework's parallelism: for Megatron-core see
    :class:`checkpointless.megatron.state.MegatronTensors`.
    """

    def group(self) -> tuple[int, ...]:
        """Return the global ranks that hold the same shard as this rank, this rank included, in ascending order."""

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return every tensor of the state, in the same order on every holder: the live storage, not copies.

        Tensors that follow from others (:meth:`~checkpointless.recovery.live_state.LiveState.derive`) may be left
        out. The tensors stay valid when the trainer that they belong to is dropped.
        """

    def essentials(self) -> dict[Key, torch.Tensor]:
        """Return the tensors from which, with those of all other ranks, the whole state can be made again.

        They are those of :meth:`tensors` without what follows from the shards of all ranks, but all of this rank's
        shard.
        """

    def shard(self) -> dict[Key, torch.Tensor]:
        """Return the tensors that this rank's optimizer update owns, on which replicas must agree."""

    def copy_buffers(self) -> Mapping[Key, torch.Tensor]:
        """Return copies of this rank's buffers as they are now."""

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Put in place those of ``tensors`` that need no copy, and return their keys."""

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Return storage for ``entries``: existing tensors, or new ones put in their place in the state."""
