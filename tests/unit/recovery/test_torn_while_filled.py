"""Test that a state whose tensors are being overwritten is not taken for whole if a further fault comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery import CheckpointManager, manager
from checkpointless.recovery.decide import Decision, Verdict
from checkpointless.state.held_state import HeldState


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
    journal: Any = SimpleNamespace(state=None)
    with pytest.raises(Fault):
        mine._restore(journal, Decision(Verdict.RESUME, target=3, refills={0: (1,)}), 3)
    assert held.commit == CommitState(3, ready=False, torn=keeps)
