"""DTensors: which ranks hold the same part of a parameter, and how a part becomes a DTensor again.

A DTensor is spread over a mesh of ranks, in each dimension of the mesh either divided (``Shard``) or repeated
(``Replicate``). FSDP2, HSDP, and tensor parallelism by a plan give such parameters, and optimizers such states.
See https://docs.pytorch.org/docs/stable/distributed.tensor.html.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.rank_groups import Group


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, which this rank may hold a part of only."""
    return hasattr(tensor, "to_local")


class HoldersByMesh:
    """Finds the holders of each tensor of a rank, as the meshes and placements of DTensors tell.

    A tensor that is no DTensor is held by the ranks that hold all DTensors of this rank. If only this rank does, it
    is held by all ranks of the meshes: what is not divided over them is the same on all of them, or the parts would
    not belong to one model.

    Raises:
        ValueError: a tensor is not fully reduced, or its mesh leaves ``rank`` out.

    Attributes:
        all: the ranks that hold the same as ``rank`` of all DTensors.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], rank: int, world_size: int) -> None:
        self._rank = rank
        self._known: dict[tuple[int, Any], Group] = {}  # by the identity of the mesh, and by placements
        spread: list[Any] = [tensor for tensor in tensors if is_sharded(tensor)]
        self._meshes = [each.device_mesh for each in spread]  # whose identities are kept by it
        groups = {self.of(each) for each in spread}
        everybody = range(world_size)
        self.all = tuple(sorted(set(everybody).intersection(*groups)))
        meshes = ({*map(int, mesh.mesh.flatten())} for mesh in {id(each): each for each in self._meshes}.values())
        self.plain = self.all if len(self.all) > 1 else tuple(sorted(set(everybody).intersection(*meshes)))

    def of(self, tensor: torch.Tensor) -> Group:
        """Return the ranks that hold the same as this rank of one tensor, in ascending order."""
        if not is_sharded(tensor):
            return self.plain
        spread: Any = tensor
        placements = tuple(spread.placements)
        name = id(spread.device_mesh), placements
        if name not in self._known:
            self._known[name] = tuple(sorted(_replicas_in(spread.device_mesh, placements, self._rank)))
        return self._known[name]


def _replicas_in(mesh: Any, placements: tuple[Any, ...], rank: int) -> set[int]:
    """Return the ranks of one mesh that hold the same part as ``rank``."""
    ranks: torch.Tensor = mesh.mesh
    places = (ranks == rank).nonzero()
    if len(places) != 1:
        raise ValueError(f"rank {rank} is not in the mesh {ranks.tolist()} of a parameter")
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a parameter is still to be reduced: its placements are {placements}")
    index = tuple(
        slice(None) if placement.is_replicate() else int(place)
        for placement, place in zip(placements, places[0].tolist(), strict=True)
    )
    return {int(each) for each in ranks[index].flatten().tolist()}


def spread_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return what an optimizer keeps for a parameter: ``part``, or a DTensor of it if the parameter is one.

    Args:
        part: a tensor of this rank, for example of the shape of its part of the parameter.

    Returns:
        ``part`` itself if the parameter is no DTensor or ``part`` has another shape than its part, as numbers have.
    """
    if not is_sharded(parameter) or part.shape != local_part(parameter).shape:
        return part
    like: Any = parameter
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
