"""Test where a rank's random streams are kept, and when they are kept nowhere."""

from __future__ import annotations

import pytest

from checkpointless.state.rank_local import state as own_replicas
from checkpointless.state.rank_local.state import _OwnReplicas


@pytest.mark.parametrize(
    ("asked", "under_our_agent", "local", "jump"),
    [
        (None, True, 4, 4),  # the next node
        (None, True, 8, 0),  # one node
        (None, False, 4, 0),  # torchrun replaces no node, so a copy would be of no use
        (2, False, 4, 2),
        (0, True, 4, 0),
        (11, True, 4, 3),
    ],
)
def test_where_streams_are_kept(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, under_our_agent: bool, local: int, jump: int
) -> None:
    monkeypatch.setattr(own_replicas.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(own_replicas, "own_board", lambda: object() if under_our_agent else None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert _OwnReplicas(asked).jump == jump


def test_a_negative_jump_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        _OwnReplicas(-1)


def test_nothing_is_made_or_sent_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_replicas.dist, "get_world_size", lambda: 8)
    _OwnReplicas(0).exchange(3, lambda: pytest.fail("nobody wants them"))
