"""The guarded optimizer update: a vote, then the local change under the lock, then the parameter gather.

Megatron's ``step_with_ready_grads`` mixes the local update with the gather of parameters. Taken apart, every moment
at which a fault can come has one answer:

* before the vote, no rank has changed anything: all resume at the step before;
* the vote is a barrier that a rank joins once its gradients are final and clipped. If any rank passed it, every
  rank had joined it, so every rank that lives can apply the same update from the gradients that it still holds;
* inside the lock, the fault thread lets the update finish; a rank that dies there is refilled, one whose update
  raised is refilled too (its shard is torn);
* after the lock the step is committed; a gather that did not finish is done again from the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from checkpointless.inprocess import ParameterUpdateLock


def sub_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers chained in ``optimizer``, or itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def update_locally(optimizers: Sequence[Any]) -> bool:
    """Apply the gradients that the optimizers hold to this rank's shards, without communication.

    Returns:
        Whether every optimizer says that it succeeded.
    """
    succeeded = True
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            succeeded &= bool(MixedPrecisionOptimizer.step_with_ready_grads(optimizer))
        else:
            succeeded &= bool(type(optimizer).step_with_ready_grads(optimizer))
    return succeeded


def gather_parameters(optimizers: Sequence[Any], force: bool = False) -> None:
    """Gather every rank's shards into the model's parameters. Collective.

    Args:
        force: also where the optimizer leaves it to the next forward pass (``overlap_param_gather``).
    """
    chunks: list[Any] = []
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer) and (force or not optimizer.ddp_config.overlap_param_gather):
            chunks += [chunk for chunk in optimizer.model_chunks if not any(chunk is known for known in chunks)]
    for chunk in chunks:
        chunk.start_param_sync(force_sync=force)


class GuardedUpdate:
    """Stands in for ``step_with_ready_grads`` of one Megatron optimizer.

    Args:
        optimizer: the (chained) Megatron optimizer.
        lock: brackets the local update.
        step: returns the optimizer step in the making.
        ready: called with the step when the gradients are final, before the vote.
        committed: called with the step when it is applied.
        vote: returns once every rank has called it.
        phase: told ``optimizer`` inside the lock and ``after_optimizer`` behind it.

    Raises:
        ValueError: the optimizer gathers parameters in the middle of its update.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        lock: ParameterUpdateLock,
        step: Callable[[], int],
        ready: Callable[[int], None],
        committed: Callable[[int], None],
        vote: Callable[[], None],
        phase: Callable[[str, int], None],
    ) -> None:
        if getattr(optimizer.config, "overlap_param_gather_with_optimizer_step", False):
            raise ValueError(
                "checkpointless cannot guard an update that is overlapped with the parameter gather: "
                "set overlap_param_gather_with_optimizer_step=False"
            )
        self._optimizers = sub_optimizers(optimizer)
        self._lock = lock
        self._step = step
        self._ready = ready
        self._committed = committed
        self._vote = vote
        self._phase = phase
        optimizer.step_with_ready_grads = self

    @torch.no_grad()
    def __call__(self) -> bool:
        """Vote, update, gather."""
        step = self._step()
        self._ready(step)
        self._vote()
        with self._lock.update(step):
            self._phase("optimizer", step)
            succeeded = update_locally(self._optimizers)
        self._committed(step)
        self._phase("after_optimizer", step)
        gather_parameters(self._optimizers)
        return succeeded
