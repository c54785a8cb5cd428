"""Check that a reader of a rank's board sees what the rank writes, torn writes excepted."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.wire.board import NO_STEP, Board, BoardReading


@pytest.fixture(scope="module")
def board() -> Board:
    return Board.create(0)


def test_a_new_board_is_empty() -> None:
    board = Board.create(3)
    assert board.read() == BoardReading(0, NO_STEP, NO_STEP, 0)
    assert board.snapshot(0) is None
    assert board.snapshot(1) is None
    board.close()


def test_another_mapping_sees_what_was_written_also_when_the_writer_is_gone() -> None:
    writer = Board.create(0)
    reader = Board(os.dup(writer.fd))
    writer.beat()
    writer.beat()
    writer.set_making(7)
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


def test_a_torn_snapshot_is_not_taken_for_whole() -> None:
    board = Board.create(0)
    board.put_snapshot(4, b"x" * 1000)
    image = os.pread(board.fd, Board.SIZE, 0)
    os.pwrite(board.fd, b"y", image.index(b"x" * 1000) + 500)
    assert board.snapshot(4) is None
    board.close()


def test_a_snapshot_that_does_not_fit_is_refused(board: Board) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        board.put_snapshot(1, b"x" * Board.SLOT_BYTES)


def test_another_file_is_no_board() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, Board.SIZE)
    with pytest.raises(ValueError, match="not a board"):
        Board(fd)
    os.close(fd)


def test_the_board_of_the_environment(monkeypatch: pytest.MonkeyPatch, board: Board) -> None:
    monkeypatch.delenv("CHECKPOINTLESS_BOARD_FD", raising=False)
    assert Board.from_environment() is None
    monkeypatch.setenv("CHECKPOINTLESS_BOARD_FD", str(board.fd))
    found = Board.from_environment()
    assert found is not None
    assert found.read() == board.read()


def test_each_series_has_its_own_snapshots(board: Board) -> None:
    for series in range(Board.SERIES):
        board.put_snapshot(8, bytes([series]), series=series)
    kept = [board.snapshot(8, series=series) for series in range(Board.SERIES)]
    assert kept == [bytes([series]) for series in range(Board.SERIES)]


def test_cleared_snapshots_are_gone(board: Board) -> None:
    board.put_snapshot(9, b"", series=1)
    assert board.snapshot(9, series=1) == b""
    board.clear_snapshots()
    assert board.snapshot(9, series=1) is None
