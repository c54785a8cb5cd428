"""The port through which recovery sees a training: its tensors by key, their replicas, and what belongs to them.

The points after a step at which a rank can resume, and its state there but for parameters and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry

if TYPE_CHECKING:
    from checkpointless.state.module_tensors import BufferCopies

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
    """A rank's state at one point but parameters and optimizer; ``buffers``: copies in the tensors' order."""

    objects: dict[str, Any]
    buffers: Mapping[Key, torch.Tensor] = field(default_factory=dict)


DATA = "the state of the training data"  # prefix of the names of parts that must not come from a peer
#: In the objects of a snapshot: what :meth:`TrainingState.capture` returned.
MODEL = "model"
#: The last word of the key of an optimizer's own (main) parameter; its other keys are torch's names of state.
PARAMETER = "parameter"


class TrainingState:
    """Model and optimizer of one rank.

    A tensor is known by its key, which is the same on every rank that holds it. What stands under a key is plain
    storage on one device: of a tensor that is spread over ranks, the part of this rank. Not all tensors of a rank
    need to have the same holders. Those with the same ones are a *part* of the state.
    :class:`~checkpointless.state.module_tensors.TrainingTensors` has all but the replica groups of torch modules
    and optimizers; those follow from the framework's parallelism.

    Attributes:
        are_reduced: whether each part has the same bytes on its whole group because it is reduced over all of it.
            If not, that is only said of the group, and each of its ranks computes the same by itself. Then a rank
            is filled by those that hold all its parts, as long as one of them lives.
    """

    buffers: BufferCopies
    are_reduced = True

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return every tensor of the state, in the same order on every holder: the live storage, not copies.

        Tensors that follow from others (:meth:`rederive`) may be left out. The tensors stay valid when the trainer
        that they belong to is dropped.
        """
        raise NotImplementedError

    def shard(self) -> dict[Key, torch.Tensor]:
        """Return the tensors that this rank's optimizer update owns, on which replicas must agree."""
        return self.tensors()

    def essentials(self) -> dict[Key, torch.Tensor]:
        """Return the tensors from which, with those of all other ranks, the whole state can be rebuilt."""
        return self.tensors()

    def replica_groups(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        """Divide ``keys``, each of a tensor of this state, by the ranks that hold the same bytes under them.

        Return the keys of each part by its replica group: global ranks in ascending order, this rank included. Each
        of them must find the same group for the key.
        """
        raise NotImplementedError

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Capture what belongs to model and optimizer and is no tensor, cheaply.

        Return what makes plain data of it, to be called before the next update.

        Raises:
            UnrecoverableError: something was changed in a way that a recovery could not repeat.
        """
        raise NotImplementedError

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Put back what was captured, or the part of it that is given."""
        raise NotImplementedError

    def allocate(
        self, entries: Sequence[TensorEntry], held: Mapping[Key, torch.Tensor] = MappingProxyType({})
    ) -> Mapping[Key, torch.Tensor]:
        """Return storage for ``entries``: existing tensors, or new ones put in their place in the state.

        Args:
            held: tensors of them, with the right bytes; one that can be used itself is put in place and returned.
        """
        raise NotImplementedError

    def finish_update(self) -> None:
        """Apply the optimizer update whose final gradients are held, without communication."""
        raise NotImplementedError

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each parameter with its gradient, if a module's next trainer may change it before the update."""
        return []

    def rederive(self, first: bool = False) -> None:
        """Derive what follows from the shards, once all shards of the job are at one step. Collective.

        Args:
            first: no step was made: derive only what a recovery derives to other bits than the start.
        """

    def weights(self) -> Iterable[torch.Tensor]:
        """Return the parameters that nothing but an update may write to, in the same order each time."""
        return ()

    def grown(self) -> str:
        """Return why no rank that is replaced has what the optimizers have; "" if it has."""
        return ""

    def groups(self) -> dict[Group, str]:
        """Return the replica groups of this rank's parts in ascending order, each with the name of one tensor."""
        found = split(self, {**self.tensors(), **self.shard()})
        return {group: ".".join(map(str, next(iter(tensors)))) for group, tensors in found.items() if tensors}

    def holders(self, keys: Iterable[Key] = ()) -> Group:
        """Return the ranks that hold the same under all of ``keys``; if there are none, under all keys."""
        groups = list(self.replica_groups(keys)) or list(self.groups())
        return tuple(sorted(set(groups[0]).intersection(*groups[1:])))


def split(state: TrainingState, tensors: Mapping[Key, torch.Tensor]) -> dict[Group, dict[Key, torch.Tensor]]:
    """Return ``tensors`` by part, groups ascending; ``RuntimeError`` if one is in no part or in several."""
    parts = state.replica_groups(tensors)
    found = [key for keys in parts.values() for key in keys]
    if len(found) != len(tensors) or {*found} != tensors.keys():
        wrong = next(iter({*found} ^ tensors.keys() or {*found}), None)
        raise RuntimeError(
            f"replica_groups() divides {len(tensors)} keys into {len(found)}, and {wrong} is among the wrong"
        )
    group_of = {key: group for group, keys in parts.items() for key in keys}
    ordered: dict[Group, dict[Key, torch.Tensor]] = {group: {} for group in sorted(parts)}
    for key, tensor in tensors.items():
        ordered[group_of[key]][key] = tensor
    return ordered
