"""Test when a rank's own buffers are kept, and that they are kept with its streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local import state as own_buffers
from checkpointless.state.rank_local.state import (
    NOTHING,
    OWN_BUFFER_BYTES,
    RankLocalState,
    _buffers_in,
    _decode,
    _OwnBuffers,
)
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


def value_in(record: bytes) -> float:
    (value,) = _decode(record)[NAME].unique().tolist()
    return float(value)


#: What the other rank begins with, what this one is told, what it keeps, and whether that is recorded.
CASES: dict[str, tuple[str, list[tuple[float, bytes]], list[float], list[bool]]] = {
    "never changed": ("same", [], [1.0], [False]),
    "changed from then on": ("same", [], [2.0, 1.0], [True, True]),
    "differ at first": ("other", [], [1.0], [True]),
    "a new process is told": ("", [(1.0, NOTHING)], [2.0], [True]),
    "a new process takes what it keeps first for the beginning": ("", [], [2.0], [False]),
    "they were its own": ("", [(1.0, b"a record")], [1.0], [True]),
    "a beginning that is known stays": ("same", [(2.0, NOTHING)], [2.0], [True]),
}


@pytest.mark.parametrize("case", CASES)
def test_buffers_that_are_a_ranks_own_are_kept(group: Answers, case: str) -> None:
    """A rank whose buffers had not changed must be told what they were: the first that it keeps are later ones."""
    peer, told, values, are_kept = CASES[case]
    own = _OwnBuffers()
    if peer:
        group([{"small": 7, "large": {}}] if peer == "other" else [])
        own.begin(buffers(1.0), [0, 1])
    for value, record in told:
        own.begun_with(buffers(value), record)
    for value, is_kept in zip(values, are_kept, strict=True):
        own.keep(buffers(value))
        assert (value_in(own.record) == value) if is_kept else own.record == NOTHING
    record = own.record
    own.keep(buffers(values[-1]))
    assert own.record is record, "the board knows by it that it has it already"


def test_what_is_too_large_and_differs_cannot_be_given_back(group: Answers) -> None:
    large: dict[Key, torch.Tensor] = {NAME: torch.zeros(OWN_BUFFER_BYTES // 4 + 1)}
    own = _OwnBuffers()
    own.begin(large, [0, 1])
    group([{"small": None, "large": {"norm.running_mean": 7}}])
    own.keep(large)
    group([{"norm.running_mean": 7}])
    own.compare([0, 1])
    other = {"alive": False, "record": "lost", "differ": []}
    group([other])
    found = own.lost(large, NOTHING, {1: [0]}, alive=False)
    assert list(found) == [1]
    assert "norm.running_mean of its modules' buffers are too large to be kept" in found[1]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    made = Board.create(0)
    monkeypatch.setattr(own_buffers, "_own_board", lambda: made)
    yield made
    made.close()


def keep(own: RankLocalState, step: int, stage: SnapshotPoint, value: float) -> None:
    """Keep buffers and streams as a journal does."""
    own.buffers.keep(buffers(value))
    own.streams.capture(step, None, stage, {}, own.buffers.record)


@pytest.mark.usefixtures("group", "board")
def test_a_new_process_finds_the_buffers_of_each_point_that_was_reached() -> None:
    own = RankLocalState(0)
    own.buffers.begin(buffers(1.0), [0, 1])
    assert own._record_of(1, SnapshotPoint.COMMITTED) is None
    values = {
        (2, SnapshotPoint.CHECKED): 1.0,
        (3, SnapshotPoint.COMMITTED): 1.0,
        (3, SnapshotPoint.CHECKED): 2.0,
        (4, SnapshotPoint.COMMITTED): 1.0,
    }
    for (step, stage), value in values.items():
        keep(own, step, stage, value)
    for owner in (own, RankLocalState(0)):
        assert owner._record_of(3, SnapshotPoint.COMMITTED) == NOTHING
        for step, stage in ((3, SnapshotPoint.CHECKED), (4, SnapshotPoint.COMMITTED)):
            assert value_in(owner._record_of(step, stage) or b"") == values[step, stage]
        assert owner._record_of(4, SnapshotPoint.CHECKED) is None, "it was not reached"


@pytest.mark.usefixtures("group", "board")
def test_buffers_that_the_update_has_written_to_take_the_place_of_those_before_it() -> None:
    own = RankLocalState(0)
    own.buffers.begin(buffers(1.0), [0, 1])
    keep(own, 1, SnapshotPoint.COMMITTED, 2.0)
    own.keep_buffers(1, SnapshotPoint.COMMITTED, buffers(3.0))
    own.keep_buffers(1, SnapshotPoint.CHECKED, buffers(3.0))
    for owner in (own, RankLocalState(0)):
        assert list(owner.streams.at(1)) == [SnapshotPoint.COMMITTED], "a point that was not kept stays unknown"
        assert value_in(_buffers_in(owner.streams.at(1)[SnapshotPoint.COMMITTED])) == 3.0
