"""The tensors of a rank's state, whatever holds them: by key, with their storage and their replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from checkpointless.state.serialization.plain_values import Tree
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry


class StateTensors(Protocol):
    """The tensors of one rank's model and optimizer.

    What moves, compares and holds tensors knows them only through this. A tensor is known by its key, which is the
    same on every rank that holds it. What stands under a key is plain storage on one device: of a tensor that is
    spread over ranks, the part of this rank (:func:`~checkpointless.state.serialization.tensor_memory.local_part`).

    :class:`~checkpointless.state.module_tensors.TrainingTensors` has keys and storage of torch modules and
    optimizers. Which ranks are replicas follows from the framework's parallelism: for Megatron-core see
    :class:`checkpointless.integrations.megatron.state.MegatronTensors`. Not all tensors of a rank need to have the
    :same holders.
    The tensors with the same ones are a *part* of the state, which is known by its replica group.
    """

    def group(self) -> Group:
        """Return the global ranks that hold all that this rank holds, this rank included, in ascending order."""

    def parts(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        """Divide ``keys``, each of a tensor of this state, by the ranks that hold the same bytes under them.

        Returns:
            The keys of each part, by its replica group: global ranks in ascending order, this rank included. Each
            of them must find the same group for the key. ``{self.group(): list(keys)}`` if nothing better is known.
        """

    def are_reduced(self) -> bool:
        """Return whether each part has the same bytes on its whole group because it is reduced over all of it.

        If not, that is only said of the group, and each of its ranks computes the same by itself. Then a rank is
        filled by those that hold all its parts, as long as one of them lives.
        """

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return every tensor of the state, in the same order on every holder: the live storage, not copies.

        Tensors that follow from others (:meth:`~checkpointless.state.live_state.LiveState.derive`) may be left
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

    def join_objects(self, objects: Mapping[Group, Tree]) -> Tree:
        """Make one non-tensor state of several, where no rank holds all parts of a rank that is filled.

        Args:
            objects: for each part the whole non-tensor state of one of its holders. What belongs to a tensor is
                right in that of its part.
        """


def groups_of(live: StateTensors) -> dict[Group, str]:
    """Return the replica groups of a rank's parts in ascending order, each with the name of one of its tensors."""
    found = split(live, {**live.tensors(), **live.shard()})
    examples = {group: ".".join(map(str, next(iter(tensors)))) for group, tensors in found.items() if tensors}
    return examples or {live.group(): ""}


def holders_of(live: StateTensors, keys: Iterable[Key]) -> Group:
    """Return the ranks that hold the same as this rank under all of ``keys``; if there are none, under all keys."""
    groups = list(live.parts(keys))
    return tuple(sorted(set(groups[0]).intersection(*groups[1:]))) if groups else live.group()


def split(live: StateTensors, tensors: Mapping[Key, torch.Tensor]) -> dict[Group, dict[Key, torch.Tensor]]:
    """Return ``tensors`` by part, in ascending order of the groups; the order inside a part stays as it is.

    Args:
        live: knows the parts.
        tensors: tensors of the state.

    Raises:
        RuntimeError: a tensor is in no part, or in several: it would not come back, or could come from two places.
    """
    parts = live.parts(tensors)
    found = [key for keys in parts.values() for key in keys]
    if len(found) != len(tensors) or {*found} != tensors.keys():
        wrong = next(iter({*found} ^ tensors.keys() or {*found}), None)
        raise RuntimeError(f"parts() divides {len(tensors)} keys into {len(found)}, and {wrong} is among the wrong")
    group_of = {key: group for group, keys in parts.items() for key in keys}
    ordered: dict[Group, dict[Key, torch.Tensor]] = {group: {} for group in sorted(parts)}
    for key, tensor in tensors.items():
        ordered[group_of[key]][key] = tensor
    return ordered
