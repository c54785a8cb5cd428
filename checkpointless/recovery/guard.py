"""The guarded optimizer update: a vote, then the local change under the lock.

Every moment at which a fault can come has one answer:

* Before the vote, no rank has changed anything: all resume at the step before.
* A rank joins the vote once its gradients are final. If any rank passed it, every rank had joined it, so every
  living rank can apply the same update from the gradients that it still holds. The vote is a sum of ones, not a
  barrier: a collective of NCCL's that was aborted ends like one that succeeded, but its sum is wrong.
* Inside the lock, the fault thread lets the update finish. A rank that dies there is refilled, and so is a rank
  whose update raised (its shard is torn).
* After the lock, the step is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from checkpointless.inprocess import ParameterUpdateLock, RankShouldRestart
from checkpointless.transfer.wire import wire_device

_Result = TypeVar("_Result")


def vote(ends: bool = False) -> bool:
    """Wait until every rank of the job holds its final gradients.

    Args:
        ends: whether this rank says that the step is to be the last.

    Returns:
        Whether any rank says so.

    Raises:
        RankShouldRestart: the groups were aborted before every rank had come.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    votes = torch.tensor([1, ends], dtype=torch.int32, device=wire_device())
    dist.all_reduce(votes)
    counted, said = votes.tolist()
    if counted != dist.get_world_size():
        raise RankShouldRestart("a fault is being handled: the vote was aborted")
    return bool(said)


def guarded_update(
    step: int,
    update: Callable[[], _Result],
    *,
    lock: ParameterUpdateLock,
    ready: Callable[[int], None],
    committed: Callable[[int], None],
    phase: Callable[[str, int], None],
    vote: Callable[[], object] = vote,
) -> _Result:
    """Apply an optimizer update so that no fault leaves ranks on both sides of it.

    Args:
        step: the optimizer step in the making.
        update: changes this rank's parameters from gradients that are final, without communication.
        lock: the lock that brackets ``update``.
        ready: called with ``step`` before the vote.
        committed: called with ``step`` when the update is applied.
        phase: called with ``optimizer`` inside the lock and ``after_optimizer`` after it, each with ``step``.
        vote: returns once every rank has called it.

    Returns:
        What ``update`` returned.

    Raises:
        RankShouldRestart: a fault is being handled, so the update must not begin.
    """
    ready(step)
    vote()
    with lock.update(step):
        phase("optimizer", step)
        result = update()
    committed(step)
    phase("after_optimizer", step)
    return result
