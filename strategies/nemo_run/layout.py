"""The layout of a NeMo-Run recipe's ranks, and whether they can hold the replicas."""

from __future__ import annotations

import os

from checkpointless.environment import WORLD_SIZE_ENV
from checkpointless.layout import Layout


def layout_of(trainer: object, strategy: object) -> Layout | None:
    """Return the layout on the job's ranks, or on those that the recipe asks for; None if it leaves them open.

    Args:
        trainer: the configuration of the recipe's trainer.
        strategy: the configuration of the trainer's strategy.
    """
    devices, nodes = getattr(trainer, "devices", None), getattr(trainer, "num_nodes", 1)
    if isinstance(devices, list | tuple):
        devices = len(devices)
    if not isinstance(devices, int) or not isinstance(nodes, int) or devices < 1:
        return None
    tensor = _size(strategy, "tensor_model_parallel_size")
    return Layout(
        world_size=int(os.environ.get(WORLD_SIZE_ENV, devices * nodes)),
        ranks_per_node=devices,
        tensor=tensor,
        pipeline=_size(strategy, "pipeline_model_parallel_size"),
        context=_size(strategy, "context_parallel_size"),
        expert=_size(strategy, "expert_model_parallel_size"),
        expert_tensor=getattr(strategy, "expert_tensor_parallel_size", None) or tensor,
    )


def require(layout: Layout, replicas: int) -> None:
    """Raise unless each shard can be held by ``replicas`` ranks.

    Args:
        layout: the layout of the recipe's ranks.
        replicas: the number of ranks that hold each shard of the optimizer.

    Raises:
        ValueError: the ranks cannot hold so many replicas; the message says what to change.
    """
    dense, experts = layout.holders()
    if dense and dense % replicas == experts % replicas == 0:
        return
    sizes = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "expert": layout.expert,
        "expert tensor": layout.expert_tensor if layout.expert_tensor != layout.tensor else 1,
    }
    shape = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "no model parallelism"
    made = f"leave {dense} data-parallel ranks" + (f" ({experts} for experts)" if layout.expert > 1 else "")
    raise ValueError(
        f"{layout.world_size} ranks ({shape}) {made if dense else 'do not divide into whole models'}, which cannot "
        f"hold {replicas} replicas: set num_nodes={layout.nodes_for(replicas)} with "
        f"{layout.ranks_per_node} devices each, or smaller parallel sizes"
    )


def _size(strategy: object, name: str) -> int:
    return getattr(strategy, name, None) or 1
