"""Test votes before an update, and what is lost or whole if a fault comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from checkpointless.inprocess import ParameterUpdateLock, RankShouldRestart
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery import CheckpointManager, manager
from checkpointless.recovery.decide import Decision, Verdict
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.recovery.manager import _find_loss
from checkpointless.state.held_state import HeldState
from checkpointless.state.port import DATA
from checkpointless.state.rank_local.state import RankLocalState


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("found", [0, 1, 3])
def test_an_aborted_vote_that_ends_like_one_that_succeeded_is_lost(
    found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted collective of NCCL's returns, and its result is what stood there, or anything."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda votes: votes.fill_(found))
    lock = ParameterUpdateLock()
    lock.set_committed(3)
    updated: list[int] = []
    call: Any = SimpleNamespace(
        steps=SimpleNamespace(making=4), parameter_update_lock=lock, enter_phase=lambda phase, step: None
    )
    with pytest.raises(RankShouldRestart):
        UpdateGuard(call, None)(lambda: updated.append(4))
    assert (updated, lock.state()) == ([], CommitState(3, ready=True, torn=False))


def test_only_data_that_differed_is_lost_with_its_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [{f"{DATA} (loaders)": "1", "a callback": "1"}, None, {f"{DATA} (loaders)": "2", "a callback": "2"}]
    monkeypatch.setattr(manager, "all_gather_json", lambda mine: answers)
    monkeypatch.setattr(manager.dist, "get_rank", lambda: 1)
    decision = Decision(Verdict.RESUME, 0, refills={1: (0, 2)}, parts={1: (((0, 1, 2), (0, 2)),)})
    reason = _find_loss(None, RankLocalState(0), dict, decision)
    assert reason == f"{DATA} (loaders) differed from rank to rank, and that of rank 1 was lost with its process"
    assert "a callback differs from rank to rank: rank [1] gets a peer's" in caplog.text


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_peer_fills_is_whole_only_if_no_model_is_kept(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager.dist, "get_rank", lambda: 0)
    kept: Any = SimpleNamespace()
    mine = CheckpointManager()
    held = HeldState(CommitState(3, ready=False, torn=False), {}, {})
    mine._held, mine.kept = held, (1, kept) if keeps else None
    state: Any = None
    with patch.object(mine._refill, "move", side_effect=RuntimeError("x")), pytest.raises(RuntimeError, match="x"):
        mine._restore(state, Decision(Verdict.RESUME, target=3, refills={0: (1,)}))
    assert held.commit == CommitState(3, ready=False, torn=keeps)
