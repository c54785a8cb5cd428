"""Test which streams a process finds on the board that the process before it has written."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local import state as own_replicas
from checkpointless.state.rank_local import state as own_streams
from checkpointless.state.rank_local.state import _found_on_board, _OwnReplicas, _OwnStreams, _put_on_board
from checkpointless.state.rng import RngStates


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(0)
    yield made
    made.close()


def streams(value: int) -> dict[str, bytes]:
    return {"python": bytes([value]) * 100}


def put(
    board: Board, step: int, value: int, loss: float | None = None, point: SnapshotPoint = SnapshotPoint.COMMITTED
) -> None:
    _put_on_board(board, step, RngStates(streams(value), loss, point))


def test_the_streams_of_the_two_newest_steps_are_known_at_each_point(board: Board) -> None:
    for step in range(1, 8):
        put(board, step, 1, 0.5 * step)
        put(board, step, 1, 0.5 * step, SnapshotPoint.CHECKED)
        for known in {max(step - 1, 1), step}:
            at = _found_on_board(board, known)
            assert list(at) == [SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED]
            assert all((each.streams, each.loss) == (streams(1), 0.5 * known) for each in at.values())
        assert _found_on_board(board, step + 1) == _found_on_board(board, step - 2) == {}


def test_a_step_that_is_made_again_leaves_the_streams_of_the_step_before(board: Board) -> None:
    for step in range(1, 5):
        put(board, step, step)
    for again in range(3):
        put(board, 4, 9, 2.0, SnapshotPoint.CHECKED)
        put(board, 4, 50 + again)
        assert _found_on_board(board, 3)[SnapshotPoint.COMMITTED].streams == streams(3)
        assert list(_found_on_board(board, 4)) == [SnapshotPoint.COMMITTED], "what had followed the step is void"
        assert _found_on_board(board, 4)[SnapshotPoint.COMMITTED].streams == streams(50 + again)


# --- The streams of the two newest steps are kept, and a new process has those of its predecessor's board ---------


@pytest.fixture
def own_board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    made = Board.create(0)
    monkeypatch.setattr(own_streams, "_own_board", lambda: made)
    yield made
    made.close()


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


# --- Test where a rank's random streams are kept, and when they are kept nowhere ----------------------------------


@pytest.mark.parametrize(
    ("asked", "under_our_agent", "local", "jump"),
    [
        (None, True, 4, 4),  # the next node
        (None, True, 8, 0),  # one node
        (None, False, 4, 0),  # torchrun replaces no node, so a copy would be of no use
        (2, False, 4, 2),
        (0, True, 4, 0),
        (11, True, 4, 3),
    ],
)
def test_where_streams_are_kept(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, under_our_agent: bool, local: int, jump: int
) -> None:
    monkeypatch.setattr(own_replicas.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(own_replicas, "_own_board", lambda: object() if under_our_agent else None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert _OwnReplicas(asked).jump == jump
