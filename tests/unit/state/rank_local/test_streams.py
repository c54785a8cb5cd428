"""The streams of the two newest steps are kept, and a new process has those of its predecessor's board."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local import state as own_streams
from checkpointless.state.rank_local.state import _OwnStreams
from checkpointless.state.rng import RngStates


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
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


def test_a_new_process_has_its_predecessors_streams(board: Board) -> None:
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
