"""Test when a rank's own buffers are kept, and what says that there is nothing to keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local import state as own_buffers
from checkpointless.state.rank_local.state import NOTHING, OWN_BUFFER_BYTES, _decode, _OwnBuffers
from checkpointless.transfer.tensor_entry import Key

NAME: Key = ("buffer", "norm.running_mean")

Answers = Callable[[list[object]], None]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return what sets the answer of the other of two ranks from now on (by default the same as ours)."""
    others: list[object] = []

    def gather(mine: object) -> list[object]:
        return [mine, others[0] if others else mine]

    monkeypatch.setattr(own_buffers, "all_gather_json", gather)
    monkeypatch.setattr(own_buffers.dist, "get_rank", lambda: 0)
    return lambda answers: others.__setitem__(slice(None), answers)


def buffers(value: float) -> dict[Key, torch.Tensor]:
    return {NAME: torch.full((3,), value)}


@pytest.mark.usefixtures("group")
def test_what_never_changes_is_not_kept() -> None:
    own = _OwnBuffers()
    own.begin(buffers(1.0), [0, 1])
    own.keep(1, SnapshotPoint.COMMITTED, buffers(1.0), None)
    assert own.record(1, SnapshotPoint.COMMITTED, None) == NOTHING


@pytest.mark.usefixtures("group")
def test_what_has_changed_is_kept_from_then_on() -> None:
    own = _OwnBuffers()
    own.begin(buffers(1.0), [0, 1])
    own.keep(1, SnapshotPoint.COMMITTED, buffers(2.0), None)
    own.keep(2, SnapshotPoint.COMMITTED, buffers(1.0), None)
    for step, value in ((1, 2.0), (2, 1.0)):
        kept = own.record(step, SnapshotPoint.COMMITTED, None)
        assert kept is not None
        assert _decode(kept)[NAME].equal(torch.full((3,), value))


def test_what_differs_in_the_beginning_is_kept(group: Answers) -> None:
    group([{"small": 7, "large": {}}])
    own = _OwnBuffers()
    own.begin(buffers(1.0), [0, 1])
    own.keep(1, SnapshotPoint.COMMITTED, buffers(1.0), None)
    assert own.record(1, SnapshotPoint.COMMITTED, None) != NOTHING


def test_a_new_process_without_a_beginning_takes_what_it_keeps_first_for_it() -> None:
    """A rank whose buffers had not changed must be told what they were: the first that it keeps are later ones."""
    told, untold = _OwnBuffers(), _OwnBuffers()
    told.begun_with(buffers(1.0))
    for own in (told, untold):
        own.keep(5, SnapshotPoint.COMMITTED, buffers(2.0), None)
    assert told.record(5, SnapshotPoint.COMMITTED, None) != NOTHING
    assert untold.record(5, SnapshotPoint.COMMITTED, None) == NOTHING


@pytest.mark.usefixtures("group")
def test_a_beginning_that_is_known_stays() -> None:
    own = _OwnBuffers()
    own.begin(buffers(1.0), [0, 1])
    own.begun_with(buffers(2.0))
    own.keep(5, SnapshotPoint.COMMITTED, buffers(2.0), None)
    assert own.record(5, SnapshotPoint.COMMITTED, None) != NOTHING


def test_what_is_too_large_and_differs_cannot_be_given_back(group: Answers) -> None:
    large: dict[Key, torch.Tensor] = {NAME: torch.zeros(OWN_BUFFER_BYTES // 4 + 1)}
    own = _OwnBuffers()
    own.begin(large, [0, 1])
    group([{"small": None, "large": {"norm.running_mean": 7}}])
    own.keep(1, SnapshotPoint.COMMITTED, large, None)
    group([{"norm.running_mean": 7}])
    own.compare(1, [0, 1])
    other = {"alive": False, "record": "lost", "differ": []}
    group([other])
    found = own.lost(large, NOTHING, {1: [0]}, alive=False)
    assert list(found) == [1]
    assert "norm.running_mean of its modules' buffers are too large to be kept" in found[1]


@pytest.mark.usefixtures("group")
def test_a_new_process_is_told_that_no_buffer_had_changed_before_the_first_one_did() -> None:
    board = Board.create(0)
    own = _OwnBuffers()
    own.begin(buffers(1.0), [0, 1])
    assert _OwnBuffers().record(1, SnapshotPoint.COMMITTED, board) is None
    for step in (1, 2):
        for stage in (SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED):
            own.keep(step, stage, buffers(1.0), board)
            assert _OwnBuffers().record(step, stage, board) == NOTHING
    own.keep(3, SnapshotPoint.COMMITTED, buffers(1.0), board)
    own.keep(3, SnapshotPoint.CHECKED, buffers(2.0), board)
    own.keep(4, SnapshotPoint.COMMITTED, buffers(1.0), board)
    for owner in (own, _OwnBuffers()):
        assert (
            owner.record(2, SnapshotPoint.CHECKED, board)
            == owner.record(3, SnapshotPoint.COMMITTED, board)
            == NOTHING
        )
        for step, stage, value in ((3, SnapshotPoint.CHECKED, 2.0), (4, SnapshotPoint.COMMITTED, 1.0)):
            kept = owner.record(step, stage, board)
            assert kept is not None
            assert _decode(kept)[NAME].equal(torch.full((3,), value))
        assert owner.record(4, SnapshotPoint.CHECKED, board) is None, "it was not reached"
    board.close()


@pytest.mark.usefixtures("group")
def test_a_module_without_buffers_is_settled_until_the_training_begins_anew() -> None:
    board = Board.create(0)
    own = _OwnBuffers()
    own.begin({}, [0, 1])
    assert not own.are_settled
    own.keep(1, SnapshotPoint.COMMITTED, {}, board)
    assert own.are_settled
    assert _OwnBuffers().record(9, SnapshotPoint.CHECKED, board) == NOTHING
    own.begin({}, [0, 1])
    assert not own.are_settled
    board.close()
