"""Messages arrive whole, and what some rank has is given to those that lack it, once, by the first that has it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from checkpointless.state.rank_local import state
from checkpointless.state.serialization import state_tree
from checkpointless.transfer import exchange
from checkpointless.transfer.exchange import receive_bytes, send_bytes

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


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> deque[torch.Tensor]:
    """Play a wire on which messages wait until they are received."""
    messages: deque[torch.Tensor] = deque()

    def receive(tensor: torch.Tensor, source: int) -> None:
        message = messages.popleft()
        assert tensor.shape == message.shape
        assert tensor.dtype == message.dtype
        tensor.copy_(message)

    monkeypatch.setattr(exchange, "wire_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(exchange, "send", lambda tensor, destination: messages.append(tensor.clone()))
    monkeypatch.setattr(exchange, "receive", receive)
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 50)
    return messages


@pytest.mark.parametrize("length", [1, 8, 49, 50, 51, 500])
def test_a_message_arrives_whole(under_way: deque[torch.Tensor], length: int) -> None:
    data = bytes(number % 251 for number in range(length))
    send_bytes(data, 1)
    assert len(under_way) == 1 + -(-length // 50)
    assert receive_bytes(0) == data
    assert not under_way


@pytest.mark.parametrize("length", [0, 1 << 40])
def test_no_announced_length_is_believed(under_way: deque[torch.Tensor], length: int) -> None:
    under_way.append(torch.tensor([length]))
    with pytest.raises(ValueError, match=f"announced a message of {length} bytes"):
        receive_bytes(0)
