"""Buckets cover every byte once, in order, and are never too large."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization.digest import PendingDigests, _digest_bytes
from checkpointless.transfer import transfer as staging
from checkpointless.transfer.transfer import (
    IN_FLIGHT,
    MEMORY_BUDGET_BYTES,
    PACKED_BYTES,
    _bucket_bytes_of,
    _in_place,
    _Plan,
    _plan_buckets,
    _size_of,
    _Slice,
    _Staging,
    _unpack,
)


@given(st.integers(1, 2**40))
def test_buckets_in_flight_stay_within_the_budget(budget: int) -> None:
    assert 0 < _bucket_bytes_of(budget) <= max(1, budget / IN_FLIGHT)


@pytest.mark.parametrize("budget", [1, 2**20, MEMORY_BUDGET_BYTES])
def test_buffers_of_packed_buckets_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    monkeypatch.setattr(staging, "wire_device", lambda: torch.device("cpu"))
    plan = _Plan.of([torch.empty(3, dtype=torch.uint8)] * 2, [], _bucket_bytes_of(budget), 1)
    buffer = _Staging([plan]).take(_size_of(plan.buckets[0]))
    assert buffer.numel() * IN_FLIGHT <= max(IN_FLIGHT, budget)


def test_the_sizes_of_the_default_budget() -> None:
    bucket_bytes = _bucket_bytes_of(MEMORY_BUDGET_BYTES)
    assert bucket_bytes == 16 * 2**20
    small, large = PACKED_BYTES // 2 - 1, 40 * 2**20
    sizes = [_size_of(bucket) for bucket in _plan_buckets([small, small, small, large], bucket_bytes)]
    assert sorted(sizes) == [small, 2 * small, 8 * 2**20, 16 * 2**20, 16 * 2**20]


@given(
    st.lists(st.integers(0, 50), max_size=9),
    st.lists(st.integers(0, 50), max_size=9),
    st.integers(1, 40),
)
def test_every_byte_comes_once_in_order_and_those_of_objects_from_the_first_holder(
    shard: list[int], inside: list[int], bucket_bytes: int
) -> None:
    places = 5
    tensors = [torch.empty(size, dtype=torch.uint8) for size in [*shard, *inside]]
    plan = _Plan.of(tensors[: len(shard)], tensors[len(shard) :], bucket_bytes, places)
    assert all(map(operator.is_, plan.tensors, tensors))
    seen = [
        (part.index, byte) for bucket in plan.buckets for part in bucket for byte in range(part.start, part.stop)
    ]
    assert sorted(seen) == [(index, byte) for index, size in enumerate(shard + inside) for byte in range(size)]
    sender = {index: place for place, indices in enumerate(plan.by_place) for index in indices}
    assert sorted(sender) == list(range(len(plan.buckets)))
    for index, bucket in enumerate(plan.buckets):
        of_objects = bucket[0].index >= len(shard)
        assert all((part.index >= len(shard)) is of_objects for part in bucket)
        assert sender[index] == (0 if of_objects else index % places)
        assert 0 < _size_of(bucket) <= bucket_bytes
        lying = [(part.index, part.start) for part in bucket]
        assert lying == sorted(lying)


# --- What is packed into a bucket is unpacked into the same bits, wherever the tensors lie ------------------------


@pytest.fixture(autouse=True)
def the_wire_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "wire_device", lambda: torch.device("cpu"))


def test_one_element_among_others_is_a_piece_of_memory() -> None:
    one, room = torch.arange(3.0).reshape(1, 3)[:, 1], torch.zeros(1, 3)[:, 1]
    assert one.is_contiguous()
    assert one.stride() == (3,)
    bucket = (_Slice(0, 0, 4),)
    piece = _in_place([one], bucket)
    assert piece is not None
    assert piece.view(torch.float32).tolist() == [1.0]
    digests = PendingDigests()
    _unpack([room], bucket, piece, digests)
    assert room.tolist() == [1.0]
    assert digests.fetch() == [_digest_bytes(piece)]
