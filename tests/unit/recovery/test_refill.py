"""A rank takes back what it holds, serves those that lost it, or is filled; what arrived is not forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from checkpointless.recovery import refill
from checkpointless.recovery.refill import Refill
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, TransferReport
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

HELD = {key: torch.full((1,), 5.0) for key in (WEIGHT, BUFFER, MOMENTUM)}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Key], Any, list[Fill]]]:
    """Record and return what this rank, number 1, sends."""
    calls: list[tuple[list[Key], Any, list[Fill]]] = []

    def send(tensors: Mapping[Key, torch.Tensor], objects: Any, fills: Sequence[Fill], on_bucket: Any) -> None:
        calls.append((list(tensors), objects, list(fills)))

    monkeypatch.setattr(refill.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(refill, "send_state", send)
    return calls


def receiver(
    arrives: Mapping[Key, float], fails: bool = False
) -> Callable[..., tuple[dict[str, int], TransferReport]]:
    """Return a stand-in for the transfer, which brings tensors of all these keys with their values."""

    def receive(
        sources: Sequence[int], room: Any, known: Mapping[Key, torch.Tensor], memory_budget_bytes: int
    ) -> tuple[dict[str, int], TransferReport]:
        receiver.known = dict(known)  # type: ignore[attr-defined]
        places = room([TensorEntry.of(key, torch.ones(1)) for key in arrives])
        for key, value in arrives.items():
            places[key].fill_(value)
        if fails:
            raise RuntimeError("a source is gone")
        return {"step": 8}, TransferReport(bytes=12, sources=tuple(sources))

    return receive


def test_a_living_rank_serves_its_destinations_first_and_takes_back_what_is_its_own(sent: list[Any]) -> None:
    live, held = MadeUpState(0, adoptable=[MOMENTUM]), dict(HELD)
    refills = {3: (0, 1), 0: (2,), 2: (1,)}
    objects, report = Refill().move(live, refills, held, {"step": 5}, memory_budget_bytes=1)
    assert sent == [([WEIGHT, BUFFER, MOMENTUM], {"step": 5}, [Fill(2, 0, 1), Fill(3, 1, 2)])]
    assert objects == {"step": 5}
    assert (report.bytes, report.kept) == (0, 12)
    assert live.adopted == [MOMENTUM]
    assert all(tensor.item() == 5 for tensor in live.present.values())
    assert all(held[key] is live.present[key] for key in held), "the new place is what is held from now on"


def test_where_nobody_is_filled_nothing_is_sent(sent: list[Any]) -> None:
    Refill().move(MadeUpState(0), {}, dict(HELD), {}, memory_budget_bytes=1)
    assert sent == []


def test_a_rank_that_holds_nothing_must_be_filled(sent: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="rank 1 was decided to be healthy but holds no state"):
        Refill().move(MadeUpState(0), {2: (0,)}, None, {}, memory_budget_bytes=1)


def test_what_an_interrupted_transfer_brought_is_known_to_the_next(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    part, first = Refill(), MadeUpState(0)
    monkeypatch.setattr(refill, "receive_state", receiver({WEIGHT: 7.0}, fails=True))
    with pytest.raises(RuntimeError, match="a source is gone"):
        part.move(first, {1: (0,)}, dict(HELD), {}, memory_budget_bytes=1)
    assert part.arrived.keys() == {WEIGHT}
    monkeypatch.setattr(refill, "receive_state", receiver({WEIGHT: 7.0, MOMENTUM: 7.0}))
    objects, report = part.move(MadeUpState(0), {1: (0,)}, dict(HELD), {}, memory_budget_bytes=1)
    known = receiver.known  # type: ignore[attr-defined]
    assert (objects, report.sources) == ({"step": 8}, (0,))
    assert {key: tensor.item() for key, tensor in known.items()} == {WEIGHT: 7.0, BUFFER: 5.0, MOMENTUM: 5.0}
    part.forget()
    assert part.arrived == {}


@pytest.mark.parametrize("adopts", [True, False])
def test_frozen_tensors_that_are_here_are_put_in_place_before_a_fill(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch, adopts: bool
) -> None:
    monkeypatch.setattr(refill, "receive_state", receiver({WEIGHT: 7.0}))
    live, mine = MadeUpState(0, adoptable=[WEIGHT, BUFFER]), {WEIGHT: torch.zeros(1)}
    Refill(adopts).move(live, {1: (0,)}, mine, {}, memory_budget_bytes=1)
    assert live.adopted == ([WEIGHT] if adopts else [])
    assert (live.present[WEIGHT] is mine[WEIGHT]) is adopts
