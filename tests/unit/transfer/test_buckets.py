"""Buckets cover every byte once, in order, and are never too large."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.transfer.transfer import (
    AHEAD_BYTES,
    IN_FLIGHT,
    PACKED_BYTES,
    _bucket_bytes_of,
    _plan_buckets,
    _shared_bytes_of,
    _Shares,
    _size_of,
    _stripe,
)


@given(st.lists(st.integers(0, 50)), st.integers(1, 40))
def test_every_byte_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    buckets = _plan_buckets(sizes, bucket_bytes)
    seen = [(part.index, byte) for bucket in buckets for part in bucket for byte in range(part.start, part.stop)]
    assert sorted(seen) == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    for bucket in buckets:
        assert 0 < _size_of(bucket) <= bucket_bytes
        places = [(part.index, part.start) for part in bucket]
        assert places == sorted(places)


@given(st.lists(st.integers(0, 50)), st.integers(1, 40))
def test_large_tensors_have_buckets_of_their_own_and_small_ones_share(sizes: list[int], bucket_bytes: int) -> None:
    buckets = _plan_buckets(sizes, bucket_bytes)
    for bucket in buckets:
        if len(bucket) > 1:
            assert all(sizes[part.index] * 2 < bucket_bytes for part in bucket)
    shared = sum(size for size in sizes if size * 2 < bucket_bytes)
    packed = [bucket for bucket in buckets if sizes[bucket[0].index] * 2 < bucket_bytes]
    assert sum(_size_of(bucket) for bucket in packed) == shared
    assert len(packed) <= 2 * shared // bucket_bytes + 1  # every one but the last is more than half full


@given(st.integers(0, 60), st.integers(1, 7))
def test_stripes_are_a_partition(count: int, places: int) -> None:
    stripes = [_stripe(count, place, places) for place in range(places)]
    assert sorted(index for part in stripes for index in part) == list(range(count))
    assert max(map(len, stripes)) - min(map(len, stripes)) <= 1


@given(st.integers(1, 2**40))
def test_buckets_in_flight_stay_within_the_budget(budget: int) -> None:
    on_cpu, ahead = _bucket_bytes_of(budget, ahead=False), _bucket_bytes_of(budget, ahead=True)
    assert on_cpu == max(1, budget // IN_FLIGHT)
    assert 0 < ahead == min(budget, AHEAD_BYTES)
    assert 0 < _shared_bytes_of(ahead, ahead=True) <= ahead


def test_the_sizes_of_the_default_budget() -> None:
    budget, mib = 128 * 2**20, 2**20
    assert _bucket_bytes_of(budget, ahead=False) == 16 * mib
    assert _shared_bytes_of(16 * mib, ahead=False) == PACKED_BYTES
    assert _bucket_bytes_of(budget, ahead=True) == 128 * mib
    assert _shared_bytes_of(128 * mib, ahead=True) == 16 * mib


@given(st.lists(st.integers(0, 200)), st.integers(1, 160))
def test_every_byte_once_on_a_wire_that_runs_ahead(sizes: list[int], bucket_bytes: int) -> None:
    buckets = _plan_buckets(sizes, bucket_bytes, ahead=True)
    seen = [(part.index, byte) for bucket in buckets for part in bucket for byte in range(part.start, part.stop)]
    assert sorted(seen) == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    assert all(0 < _size_of(bucket) <= bucket_bytes for bucket in buckets)
    shared = _shared_bytes_of(bucket_bytes, ahead=True)
    assert all(_size_of(bucket) <= shared for bucket in buckets if len(bucket) > 1)


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        _plan_buckets([1], 0)


@given(
    st.lists(st.integers(0, 50), max_size=9),
    st.lists(st.integers(0, 50), max_size=9),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_objects_come_from_the_first_holder(
    shard: list[int], inside: list[int], bucket_bytes: int, attempt: int
) -> None:
    places = 5
    shares = _Shares.of(shard, inside, bucket_bytes, places)
    indices = range(len(shares.buckets))
    seen = [
        (part.index, byte) for bucket in shares.buckets for part in bucket for byte in range(part.start, part.stop)
    ]
    assert sorted(seen) == [(index, byte) for index, size in enumerate(shard + inside) for byte in range(size)]
    assert sorted(index for each in shares.split(indices, attempt) for index in each) == list(indices)
    for index in indices:
        of_objects = shares.buckets[index][0].index >= len(shard)
        assert all((part.index >= len(shard)) is of_objects for part in shares.buckets[index])
        assert shares.sender(index, attempt) == (0 if of_objects else (index + attempt) % places)
