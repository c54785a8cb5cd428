"""The guarded optimizer update: a vote, then the local change under the lock.

Every point at which a fault can come has one answer:

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

from checkpointless.inprocess import HPCallWrapper, RankShouldRestart, active_call_wrapper
from checkpointless.inprocess.health_check import wait_for_device
from checkpointless.state.journal import StepJournal
from checkpointless.transfer.exchange import wire_device

_Result = TypeVar("_Result")


def vote(ends: bool = False) -> bool:
    """Wait until all ranks have final gradients; return whether one ``ends``; ``RankShouldRestart`` if aborted."""
    wait_for_device()
    call = active_call_wrapper()
    asked = call is not None and call.pause.is_wanted
    votes = torch.tensor([1, ends, asked], dtype=torch.int32, device=wire_device())
    dist.all_reduce(votes)
    counted, said, pauses = votes.tolist()
    if counted != dist.get_world_size():
        raise RankShouldRestart("a fault is being handled: the vote was aborted")
    if call is not None and pauses:
        call.pause.is_agreed = True
    return bool(said)


class UpdateGuard:
    """Guards updates, so that no fault leaves ranks on both sides of one; no ``journal``: nothing is captured."""

    def __init__(
        self,
        call: HPCallWrapper,
        journal: StepJournal | None,
        own_vote: Callable[[], object] | None = None,
        committed: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._call = call
        self._journal = journal
        self._own_vote = own_vote
        self._committed = committed

    def __call__(self, update: Callable[[], _Result]) -> _Result:
        """Make the update, which communicates nothing; ``RankShouldRestart`` if a fault is being handled."""
        call, journal, step = self._call, self._journal, self._call.steps.making
        call.enter_phase("before_optimizer", step)
        if journal is not None:
            journal.ready(step)
        else:
            call.parameter_update_lock.mark_ready(step)
        (self._own_vote or vote)()
        with call.parameter_update_lock.update(step):
            call.enter_phase("optimizer", step)
            result = update()
            if journal is not None:
                journal.applied()
        call.committed(step)
        self._committed(step)
        call.enter_phase("after_optimizer", step)
        return result
