"""What is packed into a bucket is unpacked into the same bits, wherever the tensors lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization.digest import PendingDigests, digest_bytes
from checkpointless.transfer import transfer as staging
from checkpointless.transfer.transfer import (
    PACKED_BYTES,
    _in_place,
    _pack,
    _plan_buckets,
    _size_of,
    _Slice,
    _Staging,
    _unpack,
)


@pytest.fixture(autouse=True)
def the_wire_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "wire_device", lambda: torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=6), st.integers(1, 300))
def test_every_bucket_arrives_as_it_was(shapes: list[tuple[int, int, bool]], bucket_bytes: int) -> None:
    def tensors(fill: float) -> list[torch.Tensor]:
        made = [torch.full((rows, columns), fill) for rows, columns, _ in shapes]
        return [each.t() if shape[2] else each for each, shape in zip(made, shapes)]

    here, there = tensors(1.5), tensors(0.0)
    for bucket in _plan_buckets([each.nbytes for each in here], bucket_bytes):
        packed = _pack(here, bucket, torch.empty(_size_of(bucket) + 7, dtype=torch.uint8))
        assert packed.numel() == _size_of(bucket)
        digests = PendingDigests()
        _unpack(there, bucket, packed, digests)
        assert digests.fetch() == [digest_bytes(packed)]
        lying = _in_place(here, bucket)
        assert lying is None or torch.equal(lying, packed)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(here, there))


def test_only_one_piece_of_memory_is_sent_from_where_it_lies() -> None:
    tensors = [torch.arange(8.0), torch.arange(8.0).reshape(2, 4).t()]
    piece = _in_place(tensors, (_Slice(0, 4, 12),))
    assert piece is not None
    assert piece.data_ptr() == tensors[0].data_ptr() + 4
    assert _in_place(tensors, (_Slice(1, 0, 32),)) is None
    assert _in_place(tensors, (_Slice(0, 0, 4), _Slice(0, 4, 8))) is None


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
    assert digests.fetch() == [digest_bytes(piece)]


def test_buffers_are_used_again_while_they_are_large_enough() -> None:
    buffers = _Staging()
    small = buffers.take(1)
    assert small.numel() == PACKED_BYTES
    buffers.give_back(small)
    assert buffers.take(PACKED_BYTES) is small
    buffers.give_back(small)
    assert buffers.take(PACKED_BYTES + 1).numel() == PACKED_BYTES + 1
    assert buffers.take(1) is not small
