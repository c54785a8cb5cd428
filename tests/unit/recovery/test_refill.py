"""A rank takes back what it holds, serves those that lost it, or is filled; what arrived is not forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from checkpointless.recovery import PEFTCheckpointManager, manager
from checkpointless.recovery.manager import _Refill
from checkpointless.state.port import MODEL, PARAMETER
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, TransferReport
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

HELD = {key: torch.full((1,), 5.0) for key in (WEIGHT, BUFFER, MOMENTUM)}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def send(tensors: Mapping[Key, torch.Tensor], objects: Any, fills: Sequence[Fill], on_bucket: Any) -> None:
        calls.append((list(tensors), objects, list(fills)))

    monkeypatch.setattr(manager.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(manager, "send_state", send)
    return calls


def test_a_living_rank_serves_its_destinations_first_and_takes_back_what_is_its_own(sent: list[Any]) -> None:
    live, held = MadeUpState(0, adoptable=[MOMENTUM]), dict(HELD)
    live.all_holders = (0, 1, 2, 3, 5)
    mine = live.all_holders
    refills = {3: ((mine, (0, 1)),), 4: (((4, 6), (6,)),), 2: ((mine, (0, 1)),)}
    objects, report = _Refill().move(live, refills, held, {"step": 5}, memory_budget_bytes=1)
    assert sent == [([WEIGHT, BUFFER, MOMENTUM], {"step": 5}, [Fill(2, 1, 2), Fill(3, 1, 2)])]
    assert objects == {"step": 5}
    assert (report.bytes, report.kept) == (0, 12)
    assert live.adopted == [MOMENTUM]
    assert all(tensor.item() == 5 for tensor in live.present.values())
    assert all(held[key] is live.present[key] for key in held), "the new place is what is held from now on"


ROW, COLUMN, EVERYBODY = (0, 1), (1, 3), (0, 1, 2, 3)
HIS: Key = ("optimizer", 0, 0, 0)
THEIRS: Key = ("optimizer", 0, 0, 1)


def test_each_part_goes_to_its_own_holders_in_the_order_of_the_groups(sent: list[Any]) -> None:
    """Rank 1 holds the weight with ranks 0 to 3, and the rest with rank 3, which gets objects of it alone."""
    live = MadeUpState(0)
    live.all_holders, live.held_by = COLUMN, {WEIGHT: EVERYBODY}
    refills = {2: ((EVERYBODY, (0, 1)), ((0, 2), (0,))), 3: ((EVERYBODY, (0, 1)), (COLUMN, (1,)))}
    _Refill().move(live, refills, dict(HELD), {"step": 5}, memory_budget_bytes=1)
    assert sent == [
        ([WEIGHT], {"step": 5}, [Fill(2, 1, 2), Fill(3, 0, 2)]),
        ([BUFFER, MOMENTUM], {}, [Fill(3, 0, 1)]),
    ]


@pytest.mark.parametrize("crossed", [True, False])
def test_a_rank_takes_objects_from_a_holder_of_all_its_parts_or_joins_those_of_all(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch, crossed: bool
) -> None:
    asked: list[Sequence[int]] = []

    def receive(sources: Sequence[int], room: Any, **options: Any) -> tuple[dict[str, Any], TransferReport]:
        asked.append(sources)
        room([TensorEntry.of(key, torch.ones(1)) for key in ([WEIGHT] if len(asked) == 1 else [MOMENTUM])])
        told = {"from": sources[0], MODEL: {"state": dict.fromkeys((HIS, THEIRS), sources[0])}}
        return told, TransferReport(bytes=12 * len(asked), sources=tuple(sources), seconds=0.5)

    monkeypatch.setattr(manager, "receive_state", receive)
    part = _Refill()
    parts = ((COLUMN, (3,)), (ROW, (0,))) if crossed else ((COLUMN, (3,)), (EVERYBODY, (0, 2, 3)))
    live = MadeUpState(0)
    live.held_by = {(*HIS, PARAMETER): COLUMN, (*THEIRS, PARAMETER): ROW}
    objects, report = part.move(live, {1: parts}, None, {}, memory_budget_bytes=1)
    assert asked == ([(0,), (3,)] if crossed else [(3, 0, 2), (3,)])
    assert objects == {"from": 0 if crossed else 3, MODEL: {"state": {HIS: 3, THEIRS: 0 if crossed else 3}}}
    assert (report.bytes, report.seconds, report.sources) == (36, 1.0, (0, 3) if crossed else (0, 2, 3))
    assert part.arrived.keys() == {WEIGHT, MOMENTUM}, "what one part brought is not forgotten by the next"


def test_a_tensor_of_which_the_rank_to_fill_has_said_nothing_is_not_left_out(sent: list[Any]) -> None:
    live = MadeUpState(0)
    live.all_holders, live.held_by = EVERYBODY, {WEIGHT: COLUMN}
    unknown = r"rank 3 is to be filled and has said nothing of \('model', 0, 'weight'"
    with pytest.raises(RuntimeError, match=unknown):
        _Refill().move(live, {3: ((EVERYBODY, (0, 1)),)}, dict(HELD), {}, memory_budget_bytes=1)
    assert sent == []


# --- Test what belongs to an adapter, and what the base model is --------------------------------------------------


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("layers.0.linear_qkv.adapter.linear_in.weight", True),
        ("layers.0.adapters", True),
        ("layers.0.linear_qkv.to_wrap.weight", False),
        ("layers.0.adapters.weight", False),
        ("a.name.of.its.own", True),
        (("model", 0, "layers.0.linear_qkv.adapter.linear_in.weight"), True),
        (("model", 1, "a.name.of.its.own"), True),
        (("model", 0, "layers.0.linear_qkv.to_wrap.weight"), False),
        (("optimizer", 0, 0, 3, "exp_avg"), True),
        (("layers.0.weight", torch.nn.Parameter(torch.ones(1))), True),
        (("layers.0.weight", torch.nn.Parameter(torch.ones(1), requires_grad=False)), False),
    ],
)
def test_adapter_keys(key: Any, expected: bool) -> None:
    manager = PEFTCheckpointManager()
    manager.params_to_save = {"a.name.of.its.own"}
    assert manager.is_adapter_key(key) is expected
