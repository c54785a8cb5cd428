"""A rank's whole state as plain bytes and tensors, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.tiers.snapshot import Snapshot
from checkpointless.replication.parts import Content
from checkpointless.serialization import state_tree
from checkpointless.transfer.tensor_entry import Key


def state() -> Snapshot:
    tensors: dict[Key, torch.Tensor] = {
        ("model", 0, "weight"): torch.randn(7, 5).t(),
        ("optimizer", 0, 0, 1, "exp_avg"): torch.randn(9).to(torch.bfloat16),
        ("optimizer", 0, 0, 1, "step"): torch.tensor(3.0),
        ("model", 0, "empty"): torch.empty(0, 3),
    }
    objects: dict[Any, Any] = {
        "step": 3,
        ("a", 1): [True, None, {"large": torch.arange(2000.0)}],
        "optimizer": {"state": {("optimizer", 0, 0, 1): {"step": 3}}},
    }
    buffers: dict[Key, torch.Tensor] = {("model", 0, "mean"): torch.randn(3)}
    return Snapshot(
        3, Stage.COMMITTED, 1, 0, tensors, Moment(objects, buffers), b"streams", b"before", None, b"own"
    )


def same(one: Snapshot, other: Snapshot) -> None:
    plain = [vars(each) | {"moment": vars(each.moment), "stage": int(each.stage)} for each in (one, other)]
    assert state_tree.digest(plain[0]) == state_tree.digest(plain[1])


def test_it_comes_back_as_it_was() -> None:
    snapshot = state()
    same(Snapshot.of(snapshot.content()), snapshot)
    assert list(Snapshot.of(snapshot.content()).tensors) == list(snapshot.tensors)


@pytest.mark.parametrize(
    "content", [Content(state_tree.dumps({"format": 0}), ()), Content(state_tree.dumps([]), ())]
)
def test_anything_else_is_refused(content: Content) -> None:
    with pytest.raises(ValueError, match="copy of"):
        Snapshot.of(content)
