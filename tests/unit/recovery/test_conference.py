"""Test which names of parts differ from rank to rank, and what of a rank is lost with its process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery import CheckpointManager, manager
from checkpointless.recovery.decide import Decision, Verdict
from checkpointless.recovery.manager import _find_loss
from checkpointless.state.held_state import HeldState
from checkpointless.state.port import DATA
from checkpointless.state.rank_local.state import RankLocalState


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


# --- That a state whose tensors are being overwritten is not taken for whole if a further fault comes -------------


class Fault(Exception):
    """A fault while a peer fills this rank."""


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_peer_fills_is_whole_only_if_no_model_is_kept(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager.dist, "get_rank", lambda: 0)
    kept: Any = SimpleNamespace()
    mine = CheckpointManager()
    held = HeldState(CommitState(3, ready=False, torn=False), {}, {})
    mine._held, mine.kept = held, (1, kept) if keeps else None

    def move(*_: object, **__: object) -> Any:
        raise Fault

    monkeypatch.setattr(mine._refill, "move", move)
    state: Any = None
    with pytest.raises(Fault):
        mine._restore(state, Decision(Verdict.RESUME, target=3, refills={0: (1,)}))
    assert held.commit == CommitState(3, ready=False, torn=keeps)
