"""Test which streams a process finds on the board that the process before it has written."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local import state as own_streams
from checkpointless.state.rank_local.state import _OwnStreams, _StreamsOnBoard
from checkpointless.state.rng import RngStates


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(0)
    yield made
    made.close()


def streams(value: int) -> dict[str, bytes]:
    return {"python": bytes([value]) * 100}


def put(kept: _StreamsOnBoard, step: int, value: int | dict[str, bytes], loss: float | None = None) -> RngStates:
    states = RngStates(value if isinstance(value, dict) else streams(value), loss)
    kept.put(step, states, None)
    return states


def found(board: Board, step: int) -> dict[SnapshotPoint, RngStates]:
    return _StreamsOnBoard(board).at(step)


def test_streams_that_do_not_move_are_written_once_and_known_of_each_step(board: Board) -> None:
    kept, same = _StreamsOnBoard(board), streams(1)
    for step in range(1, 8):
        put(kept, step, same, 0.5 * step)
        kept.put(step, RngStates(same, 0.5 * step, SnapshotPoint.CHECKED), RngStates(same))
        assert max(board.numbers(0)) == 1
        for known in {max(step - 1, 1), step}:
            at = found(board, known)
            assert list(at) == [SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED]
            assert all((each.streams, each.loss) == (same, 0.5 * known) for each in at.values())
        assert found(board, step + 1) == found(board, step - 2) == {}


@pytest.mark.parametrize("moves", [(1, 2, 3, 3), (1, 1, 2, 3), (1, 2, 2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("new_process", [False, True])
def test_a_step_that_is_made_again_leaves_the_streams_of_the_step_before(
    board: Board, moves: tuple[int, ...], new_process: bool
) -> None:
    """The second time another snapshot is written, which must not take the place of the one before."""
    kept = _StreamsOnBoard(board)
    for step, value in enumerate(moves, start=1):
        put(kept, step, value)
    for again in range(3):
        kept = _StreamsOnBoard(board) if new_process else kept
        kept.put(4, RngStates(streams(9), 2.0, SnapshotPoint.CHECKED), RngStates(streams(9)))
        put(kept, 4, 50 + again)
        assert found(board, 3)[SnapshotPoint.COMMITTED].streams == streams(moves[2])
        assert list(found(board, 4)) == [SnapshotPoint.COMMITTED], "what had followed the step is void"
        assert found(board, 4)[SnapshotPoint.COMMITTED].streams == streams(50 + again)


def test_a_moment_that_is_reached_again_as_after_the_step_is_not_what_it_was(board: Board) -> None:
    kept = _StreamsOnBoard(board)
    after = put(kept, 3, 1)
    kept.put(3, RngStates(streams(2), None, SnapshotPoint.ACCUMULATED), after)
    kept.put(3, RngStates(after.streams, None, SnapshotPoint.ACCUMULATED), after)
    assert found(board, 3)[SnapshotPoint.ACCUMULATED].streams == after.streams


def test_what_is_kept_beside_the_streams_is_not_taken_for_that_of_another_step(board: Board) -> None:
    kept, same = _StreamsOnBoard(board), streams(1)
    for step, own in enumerate([{}, {"mine": 1}, {"mine": 2}, {}], start=1):
        kept.put(step, dataclasses.replace(RngStates(same), own=own), None)
        assert found(board, step)[SnapshotPoint.COMMITTED].own == own


def test_a_board_that_was_cleared_gets_the_streams_again(board: Board) -> None:
    kept, same = _StreamsOnBoard(board), streams(1)
    put(kept, 1, same)
    board.clear_snapshots()
    assert found(board, 1) == {}
    put(kept, 2, same)
    assert found(board, 2)[SnapshotPoint.COMMITTED].streams == same


def test_a_snapshot_that_was_not_finished_is_not_there_and_the_one_before_is(board: Board) -> None:
    kept = _StreamsOnBoard(board)
    put(kept, 1, 1)
    board.put_parts(2, *RngStates(streams(2)).to_parts(), 0)  # the process ended before it marked the step
    assert found(board, 2) == {}
    assert found(board, 1)[SnapshotPoint.COMMITTED].streams == streams(1)


# --- The streams of the two newest steps are kept, and a new process has those of its predecessor's board ---------


@pytest.fixture
def own_board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    made = Board.create(0)
    monkeypatch.setattr(own_streams, "own_board", lambda: made)
    yield made
    made.close()


def test_the_two_newest_steps_are_kept() -> None:
    streams = _OwnStreams()
    for step in range(4):
        streams.capture(step, 0.5 * step, SnapshotPoint.COMMITTED, {})
    assert [step for step in range(5) if streams.at(step)] == [2, 3]
    assert streams.known() == ((2, 0), (3, 0))
    streams.forget()
    assert streams.known() == ()
    assert streams.newest(3) is None


def test_a_step_that_is_made_again_voids_what_followed_it() -> None:
    streams = _OwnStreams()
    streams.capture(1, 0.5, SnapshotPoint.COMMITTED, {})
    streams.capture(1, None, SnapshotPoint.CHECKED, {"mine": 1})
    newest = streams.newest(1)
    assert newest is not None
    assert (newest.stage, newest.loss, newest.own) == (SnapshotPoint.CHECKED, 0.5, {"mine": 1})
    streams.capture(1, 0.25, SnapshotPoint.COMMITTED, {})
    assert streams.known() == ((1, 0),)


def test_streams_go_on_where_they_were() -> None:
    streams = _OwnStreams()
    streams.capture(1, None, SnapshotPoint.ENDED, None)
    drawn = random.random()
    assert streams.restore(1, SnapshotPoint.ENDED)
    assert random.random() == drawn
    assert not streams.restore(1, SnapshotPoint.COMMITTED)
    assert not streams.restore(2, SnapshotPoint.ENDED)


def test_a_new_process_has_its_predecessors_streams(own_board: Board) -> None:
    before = _OwnStreams()
    before.capture(1, 0.5, SnapshotPoint.COMMITTED, {})
    before.capture(1, None, SnapshotPoint.ENDED, {"mine": 1})
    before.keep_data_start(RngStates.capture())
    after = _OwnStreams()
    assert {stage: states.own for stage, states in after.at(1).items()} == {
        SnapshotPoint.COMMITTED: {},
        SnapshotPoint.ENDED: {"mine": 1},
    }
    random.random()
    after.capture(1, None, SnapshotPoint.CHECKED, {})
    assert list(after.at(1)) == [SnapshotPoint.COMMITTED, SnapshotPoint.ENDED, SnapshotPoint.CHECKED]
    start, kept = before.data_start(), after.data_start()
    assert start is not None
    assert kept is not None
    assert kept.same_streams(start)
