"""Test the vote before an update, which is won only if every rank has come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointless.inprocess import ParameterUpdateLock, RankShouldRestart
from checkpointless.recovery.guard import UpdateGuard


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("found", [0, 1, 3])
def test_an_aborted_vote_that_ends_like_one_that_succeeded_is_lost(
    found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted collective of NCCL's returns, and its result is what stood there, or anything."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def aborted(votes: torch.Tensor) -> None:
        votes.fill_(found)

    monkeypatch.setattr(dist, "all_reduce", aborted)
    lock = ParameterUpdateLock()
    lock.set_committed(3)
    updated: list[int] = []
    call: Any = SimpleNamespace(
        steps=SimpleNamespace(making=4), parameter_update_lock=lock, enter_phase=lambda phase, step: None
    )
    with pytest.raises(RankShouldRestart):
        UpdateGuard(call, None)(lambda: updated.append(4))
    assert updated == []
    assert lock.state().ready
    assert not lock.state().torn
