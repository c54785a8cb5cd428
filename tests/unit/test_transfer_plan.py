"""Buckets cover every byte once, in order, and are never too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.recovery.transfer import plan_buckets


@given(st.lists(st.integers(0, 50)), st.integers(1, 17))
def test_every_byte_once_and_in_order(sizes: list[int], bucket_bytes: int) -> None:
    buckets = plan_buckets(sizes, bucket_bytes)
    seen = [(part.index, byte) for bucket in buckets for part in bucket for byte in range(part.start, part.stop)]
    assert seen == [(index, byte) for index, size in enumerate(sizes) for byte in range(size)]
    lengths = [sum(part.stop - part.start for part in bucket) for bucket in buckets]
    assert all(length == bucket_bytes for length in lengths[:-1])
    assert all(0 < length <= bucket_bytes for length in lengths)
