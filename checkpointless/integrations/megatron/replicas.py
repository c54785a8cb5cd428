"""Find the ranks that hold the same shard of model and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def replica_group(optimizers: Sequence[Any]) -> tuple[int, ...]:
    """Return the global ranks that hold all that this rank holds, including this rank, in ascending order.

    With the distributed optimizer these are the ranks of the inter-distributed-optimizer-instance group (only
    this rank if there is one instance); without it, all ranks of the data-parallel group.

    Args:
        optimizers: the Megatron optimizers of this rank.
    """
    return replicas(any(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers))


def replicas(distributed_optimizer: bool) -> tuple[int, ...]:
    """Return what :func:`replica_group` returns, before the optimizers are created.

    Args:
        distributed_optimizer: whether the optimizers will be Megatron's distributed ones.
    """
    if distributed_optimizer:
        group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
        if group is None:
            return (dist.get_rank(),)
        return tuple(sorted(dist.get_process_group_ranks(group)))
    both = dense_and_experts()
    if both is None:
        return _members(parallel_state.get_data_parallel_group(with_context_parallel=True))
    dense, experts = both
    return tuple(sorted({*dense} & {*experts}))


def dense_and_experts() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return, without the distributed optimizer, the holders of this rank's dense parameters, and of its experts.

    Returns:
        The ranks over which Megatron reduces the gradients of either; None without expert parallelism, where it
        reduces all over the same.
    """
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return None
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return _members(dense), _members(parallel_state.get_expert_data_parallel_group())


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
