"""What some rank has is given to those that lack it, once, by the first that has it."""

from __future__ import annotations

from typing import Any

import pytest

from checkpointless.state.rank_local import state
from checkpointless.state.serialization import state_tree

MINE = {"epoch": 3}


@pytest.mark.parametrize(
    ("have", "rank", "receivers", "source"),
    [
        ([False, True, False, True], 1, [0, 2], None),
        ([False, True, False, True], 3, [], None),
        ([False, True, False, True], 2, [], 1),
        ([True, True], 0, [], None),
        ([False, False], 0, [], None),
    ],
)
def test_who_gives_and_who_is_given(
    monkeypatch: pytest.MonkeyPatch, have: list[bool], rank: int, receivers: list[int], source: int | None
) -> None:
    sent: list[int] = []
    received: list[int] = []

    def send(payload: bytes, destination: int) -> None:
        assert state_tree.loads(payload) == MINE
        sent.append(destination)

    def receive(giver: int) -> bytes:
        received.append(giver)
        return state_tree.dumps(MINE)

    def gather(mine: Any) -> list[bool]:
        assert mine is have[rank]
        return have

    monkeypatch.setattr(state, "all_gather_json", gather)
    monkeypatch.setattr(state.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(state, "send_bytes", send)
    monkeypatch.setattr(state, "receive_bytes", receive)
    fits = state._Fits()
    fits.finished = {0: MINE} if have[rank] else {}
    assert fits.share_finished() == (MINE if any(have) else None)
    assert sent == receivers
    assert received == ([] if source is None else [source])
