"""A rank's whole state as plain bytes and tensors, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.local_checkpoint.content import Content
from checkpointless.recovery.moment import Moment, Stage
from checkpointless.recovery.tiers import host_part
from checkpointless.recovery.tiers.host_part import HostMemoryPool, copy_into, laid_out, room_for
from checkpointless.recovery.tiers.snapshot import Snapshot
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


def test_it_lies_in_one_piece_of_host_memory_and_travels_as_that() -> None:
    snapshot, pool = state(), HostMemoryPool()
    content = snapshot.content()
    part = laid_out(content, pool)
    copy_into(part, content.tensors)
    same(Snapshot.of(part.content), snapshot)
    other = room_for(part.header(), part.memory.numel(), HostMemoryPool())
    other.memory.copy_(part.memory)
    same(Snapshot.of(other.content), snapshot)


@pytest.mark.parametrize(
    "content", [Content(state_tree.dumps({"format": 0}), ()), Content(state_tree.dumps([]), ())]
)
def test_anything_else_is_refused(content: Content) -> None:
    with pytest.raises(ValueError, match="copy of"):
        Snapshot.of(content)


def test_a_part_whose_size_is_wrong_is_refused() -> None:
    part = laid_out(Content(b"x", (torch.zeros(8),)), HostMemoryPool())
    with pytest.raises(ValueError, match="a part of 8 bytes whose tensors take 256"):
        room_for(part.header(), 8, HostMemoryPool())
    with pytest.raises(ValueError, match="cannot be read"):
        room_for(state_tree.dumps({"structure": b""}), 0, HostMemoryPool())


def test_memory_is_used_again_and_only_when_nothing_lies_in_it() -> None:
    pool = HostMemoryPool()
    content = Content(b"", (torch.ones(1000),))
    first, second = laid_out(content, pool), laid_out(content, pool)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    pool.keep_only([second])
    third = laid_out(content, pool)
    assert third.memory.data_ptr() == first.memory.data_ptr()
    pool.keep_only([])
    large = laid_out(Content(b"", (torch.ones(1_000_000),)), pool)
    assert large.memory.numel() >= 4_000_000


def test_pages_are_locked_as_long_as_a_part_or_the_pool_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: set[int] = set()

    def lock(memory: torch.Tensor) -> bool:
        locked.add(memory.data_ptr())
        return True

    monkeypatch.setattr(host_part, "lock_pages", lock)
    monkeypatch.setattr(host_part, "unlock_pages", lambda memory: locked.remove(memory.data_ptr()))
    pool = HostMemoryPool()
    kept, spare = (laid_out(Content(b"x", (torch.zeros(8),)), pool) for _ in range(2))
    assert len(locked) == 2
    del pool, spare
    assert locked == {kept.memory.data_ptr()}
    del kept
    assert not locked
