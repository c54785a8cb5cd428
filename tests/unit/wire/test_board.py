"""Check that a reader of a rank's board sees what the rank writes, torn writes excepted."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.protocol.board import Board, BoardReading, PaceReading


@pytest.fixture(scope="module")
def board() -> Board:
    return Board.create(0)


def test_another_mapping_sees_what_was_written_also_when_the_writer_is_gone() -> None:
    writer = Board.create(0)
    reader = Board(os.dup(writer.fd))
    writer.beat()
    writer.begin_step(7)
    writer.set_committed(6)
    writer.set_generation(2)
    writer.put_snapshot(6, b"streams")
    writer.close()
    assert reader.read() == BoardReading(2, 7, 6, 2)
    assert reader.snapshot(6) == b"streams"
    reader.close()


@given(st.lists(st.binary(max_size=64), min_size=2, max_size=6))
def test_the_two_newest_snapshots_are_kept(board: Board, payloads: list[bytes]) -> None:
    for step, payload in enumerate(payloads):
        board.put_snapshot(step, payload)
    last = len(payloads) - 1
    assert board.snapshot(last) == payloads[last]
    assert board.snapshot(last - 1) == payloads[last - 1]
    assert board.snapshot(last - 2) is None


PARTS = [bytes([number]) * size for number, size in enumerate((0, 1, 5, 40, 40, 90), start=65)]


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=9), st.lists(st.sampled_from(PARTS), max_size=5))))
def test_parts_that_are_there_are_read_like_new(board: Board, puts: list[tuple[int, bytes, list[bytes]]]) -> None:
    reader = Board(os.dup(board.fd))
    for step, head, parts in puts:
        if len(parts) == 5:  # a snapshot of one piece between those of parts
            board.put_snapshot(step, b"".join(parts), 4)
        else:
            board.put_snapshot(step, head, 4, parts)
        expected = b"".join(parts) if len(parts) == 5 else head + b"".join(parts)
        assert reader.snapshot(step, 4) == expected
    reader.close()


def test_a_part_that_is_there_already_is_not_copied_and_one_that_is_equal_is() -> None:
    board = Board.create(0)
    part, equal = b"x" * 1000, bytes(bytearray(b"x" * 1000))
    board.put_snapshot(4, b"head", parts=[part])
    place = os.pread(board.fd, Board.SIZE, 0).index(part)
    os.pwrite(board.fd, b"y", place)  # shows whether it is written again
    board.put_snapshot(6, b"HEAD", parts=[part])
    damaged = board.snapshot(6)
    assert damaged is not None
    assert damaged[4:5] == b"y"
    board.put_snapshot(8, b"head", parts=[equal])
    assert board.snapshot(8) == b"head" + part
    os.pwrite(board.fd, b"z", place - 1)
    assert board.snapshot(8) is None, "the head has a checksum"
    board.close()


def test_a_torn_snapshot_is_not_taken_for_whole() -> None:
    board = Board.create(0)
    board.put_snapshot(4, b"x" * 1000)
    image = os.pread(board.fd, Board.SIZE, 0)
    os.pwrite(board.fd, b"y", image.index(b"x" * 1000) + 500)
    assert board.snapshot(4) is None
    board.close()


@pytest.mark.parametrize("size", [0, 4096, Board.SIZE + 4096])
def test_nobody_can_cut_a_board_or_let_it_grow(board: Board, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(board.fd, size)
    assert os.fstat(board.fd).st_size == Board.SIZE


def test_the_newest_paces_are_kept_until_another_generation_begins() -> None:
    board = Board.create(0)
    assert board.paces() == PaceReading(0, 0)
    board.set_role(0xFFFFFFFF)
    for step in range(1, Board.PACES + 3):
        board.add_pace(float(step), 0.5)
    found = board.paces()
    assert (found.role, found.steps) == (0xFFFFFFFF, Board.PACES + 2)
    assert sorted(found.own) == [float(step) for step in range(3, Board.PACES + 3)]
    assert found.data == (0.5,) * Board.PACES
    board.set_generation(1)
    assert board.paces() == PaceReading(0xFFFFFFFF, 0)
    board.close()
