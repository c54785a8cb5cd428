"""Calls cover every byte once, in order, within the limits of a call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.transfer.read_plan import CALL_BYTES, Piece, calls_of, left_of

GIB = 2**30
SIZES = st.lists(st.integers(0, 40), max_size=12)


def bytes_of(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.part, byte) for piece in pieces for byte in range(piece.start, piece.stop)]


@given(SIZES, st.integers(1, 50), st.integers(1, 5))
def test_every_byte_once_and_in_order(sizes: list[int], call_bytes: int, most: int) -> None:
    calls = list(calls_of(sizes, call_bytes, most))
    assert bytes_of([piece for call in calls for piece in call]) == [
        (part, byte) for part, size in enumerate(sizes) for byte in range(size)
    ]
    for call in calls:
        assert 0 < len(call) <= most
        assert 0 < sum(piece.nbytes for piece in call) <= call_bytes
        assert all(piece.nbytes for piece in call)


@given(SIZES, st.data())
def test_a_call_goes_on_where_it_was_cut(sizes: list[int], data: st.DataObject) -> None:
    call = [piece for each in calls_of(sizes, 1000, 1000) for piece in each]
    done = data.draw(st.integers(0, sum(sizes)))
    assert bytes_of(left_of(call, done)) == bytes_of(call)[done:]
    assert all(piece.nbytes for piece in left_of(call, done))


def test_a_call_is_full_unless_it_has_as_many_pieces_as_it_may() -> None:
    assert [sum(piece.nbytes for piece in call) for call in calls_of([7, 7, 7], 10, 1024)] == [10, 10, 1]
    assert [len(call) for call in calls_of([1] * 2500, 10**6, 1024)] == [1024, 1024, 452]


def test_a_tensor_of_more_than_two_gib_is_cut() -> None:
    calls = list(calls_of([5 * GIB + 1], CALL_BYTES, 1024))
    assert len(calls) == 5 * GIB // CALL_BYTES + 1
    assert calls[-1] == [Piece(0, 5 * GIB, 5 * GIB + 1)]
