"""Test what of a rank alone outlives its process, and that ranks agree on who holds the same."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local import agreement, state
from checkpointless.state.rank_local.agreement import require_agreement
from checkpointless.state.rank_local.state import NOTHING, RankLocalState
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.transfer.tensor_entry import Key
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

COMMITTED, CHECKED = SnapshotPoint.COMMITTED, SnapshotPoint.CHECKED


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    """Yield the board of this rank."""
    made = Board.create(0)
    monkeypatch.setattr(state, "_own_board", lambda: made)
    yield made
    made.close()


def streams_of(value: int) -> dict[str, bytes]:
    return {"python": bytes([value]) * 100}


def put(board: Board, step: int, value: int, loss: float | None = None, point: SnapshotPoint = COMMITTED) -> None:
    state._put_on_board(board, step, RngStates(streams_of(value), loss, point))


def test_the_streams_of_the_two_newest_steps_are_known_at_each_point(board: Board) -> None:
    for step in range(1, 8):
        put(board, step, 1, 0.5 * step)
        put(board, step, 1, 0.5 * step, CHECKED)
        for known in {max(step - 1, 1), step}:
            at = state._found_on_board(board, known)
            assert list(at) == [COMMITTED, CHECKED]
            assert all((each.streams, each.loss) == (streams_of(1), 0.5 * known) for each in at.values())
        assert state._found_on_board(board, step + 1) == state._found_on_board(board, step - 2) == {}


def test_a_step_that_is_made_again_leaves_the_streams_of_the_step_before(board: Board) -> None:
    for step in range(1, 5):
        put(board, step, step)
    for again in range(3):
        put(board, 4, 9, 2.0, CHECKED)
        put(board, 4, 50 + again)
        assert state._found_on_board(board, 3)[COMMITTED].streams == streams_of(3)
        assert list(state._found_on_board(board, 4)) == [COMMITTED], "what had followed the step is void"
        assert state._found_on_board(board, 4)[COMMITTED].streams == streams_of(50 + again)


def test_a_new_process_has_its_predecessors_streams(board: Board) -> None:
    before = state._OwnStreams()
    before.capture(1, 0.5, COMMITTED, {})
    before.capture(1, None, SnapshotPoint.ENDED, {"mine": 1})
    before.keep_data_start(RngStates.capture())
    after = state._OwnStreams()
    assert {at: kept.own for at, kept in after.at(1).items()} == {COMMITTED: {}, SnapshotPoint.ENDED: {"mine": 1}}
    random.random()
    after.capture(1, None, CHECKED, {})
    assert list(after.at(1)) == [COMMITTED, SnapshotPoint.ENDED, CHECKED]
    start, kept = before.data_start(), after.data_start()
    assert start is not None
    assert kept is not None
    assert kept.streams == start.streams


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
    monkeypatch.setattr(state.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(state, "_own_board", lambda: object() if under_our_agent else None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert state._OwnReplicas(asked).jump == jump


NAME: Key = ("buffer", "norm.running_mean")

Answers = Callable[[list[object]], None]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return what sets the answer of the other of two ranks from now on (by default the same as ours)."""
    others: list[object] = []

    def gather(mine: object) -> list[object]:
        return [mine, others[0] if others else mine]

    monkeypatch.setattr(state, "all_gather_json", gather)
    monkeypatch.setattr(state.dist, "get_rank", lambda: 0)
    return lambda answers: others.__setitem__(slice(None), answers)


def buffers(value: float) -> dict[Key, torch.Tensor]:
    return {NAME: torch.full((3,), value)}


def value_in(record: bytes) -> float:
    (value,) = state._decode(record)[NAME].unique().tolist()
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
    own = state._OwnBuffers()
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
    large: dict[Key, torch.Tensor] = {NAME: torch.zeros(state.OWN_BUFFER_BYTES // 4 + 1)}
    own = state._OwnBuffers()
    own.begin(large, [0, 1])
    group([{"small": None, "large": {"norm.running_mean": 7}}])
    own.keep(large)
    group([{"norm.running_mean": 7}])
    own.compare([0, 1])
    group([{"alive": False, "record": "lost", "differ": []}])
    found = own.lost(large, NOTHING, {1: [0]}, alive=False)
    assert list(found) == [1]
    assert "norm.running_mean of its modules' buffers are too large to be kept" in found[1]


def keep(own: RankLocalState, step: int, stage: SnapshotPoint, value: float) -> None:
    """Keep buffers and streams as a journal does."""
    own.buffers.keep(buffers(value))
    own.streams.capture(step, None, stage, {}, own.buffers.record)


@pytest.mark.usefixtures("group", "board")
def test_a_new_process_finds_the_buffers_of_each_point_that_was_reached() -> None:
    own = RankLocalState(0)
    own.buffers.begin(buffers(1.0), [0, 1])
    assert own.streams.record_of_buffers(1, COMMITTED) is None
    values = {(2, CHECKED): 1.0, (3, COMMITTED): 1.0, (3, CHECKED): 2.0, (4, COMMITTED): 1.0}
    for (step, stage), value in values.items():
        keep(own, step, stage, value)
    for owner in (own, RankLocalState(0)):
        assert owner.streams.record_of_buffers(3, COMMITTED) == NOTHING
        for step, stage in ((3, CHECKED), (4, COMMITTED)):
            assert value_in(owner.streams.record_of_buffers(step, stage) or b"") == values[step, stage]
        assert owner.streams.record_of_buffers(4, CHECKED) is None, "it was not reached"


@pytest.mark.usefixtures("group", "board")
def test_buffers_that_the_update_has_written_to_take_the_place_of_those_before_it() -> None:
    own = RankLocalState(0)
    own.buffers.begin(buffers(1.0), [0, 1])
    keep(own, 1, COMMITTED, 2.0)
    own.keep_buffers(1, COMMITTED, buffers(3.0))
    own.keep_buffers(1, CHECKED, buffers(3.0))
    for owner in (own, RankLocalState(0)):
        assert list(owner.streams.at(1)) == [COMMITTED], "a point that was not kept stays unknown"
        assert value_in(owner.streams.record_of_buffers(1, COMMITTED) or b"") == 3.0


def a_rank(number: int) -> MadeUpState:
    """Return the state of one of four ranks, which holds the weight with all others, and the rest with its row."""
    live = MadeUpState(0)
    live.all_holders = ((0, 1), (2, 3))[number // 2]
    live.held_by = {WEIGHT: (0, 1, 2, 3)}
    live.present[MOMENTUM].fill_(number // 2)
    live.present[BUFFER].fill_(number)
    return live


def meet(states: list[MadeUpState], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the ranks with these states meet, each in a thread, and return why they are refused."""
    meeting, answers = threading.Barrier(len(states), timeout=60), dict[int, Any]()
    numbers = threading.local()

    def gather(mine: Any) -> list[Any]:
        answers[numbers.own] = json.loads(json.dumps(mine))
        meeting.wait()
        told = [answers[number] for number in range(len(states))]
        meeting.wait()
        return told

    def meet_as(number: int) -> str:
        numbers.own = number
        try:
            require_agreement(states[number], [BUFFER])
        except UnrecoverableError as error:
            return str(error)
        return ""

    monkeypatch.setattr(agreement, "all_gather_json", gather)
    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(meet_as, range(len(states))))


def test_what_the_same_ranks_hold_is_the_same_and_buffers_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet([a_rank(number) for number in range(4)], monkeypatch) == [""] * 4


@pytest.mark.parametrize(
    ("key", "wrong", "reason"),
    [
        (WEIGHT, 2, "ranks 0, 1, 2, 3 are to hold the same model.0.weight, {} rank 2 than on rank 0"),
        (MOMENTUM, 3, "ranks 2, 3 are to hold the same {name}, {} rank 3 than on rank 2"),
    ],
    ids=["of-all", "of-a-row"],
)
def test_a_tensor_that_is_a_ranks_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: Key, wrong: int, reason: str
) -> None:
    states = [a_rank(number) for number in range(4)]
    states[wrong].present[key].fill_(9)
    expected = reason.format("and it begins with other values on", name=".".join(map(str, key))) + (
        ": give it the same values before training (seed the ranks alike, or broadcast it), or say which ranks "
        "hold the same (group=)"
    )
    assert meet(states, monkeypatch) == [expected] * 4


# --- What some rank has is given to those that lack it, once, by the first that has it ----------------------------

MINE = {"epoch": 3}


@pytest.mark.parametrize(
    ("have", "rank", "receivers", "sources"),
    [
        ([False, True, False, True], 1, [0, 2], []),
        ([False, True, False, True], 3, [], []),
        ([False, True, False, True], 2, [], [1]),
        ([True, True], 0, [], []),
        ([False, False], 0, [], []),
    ],
)
def test_who_gives_and_who_is_given(
    monkeypatch: pytest.MonkeyPatch, have: list[bool], rank: int, receivers: list[int], sources: list[int]
) -> None:
    sent, received = list[int](), list[int]()

    def send(payload: bytes, destination: int) -> None:
        assert state_tree.loads(payload) == MINE
        sent.append(destination)

    def receive(giver: int) -> bytes:
        received.append(giver)
        return state_tree.dumps(MINE)

    def gather(mine: Any) -> list[bool]:
        assert mine is have[rank]
        return have

    monkeypatch.setattr(state, "all_gather_json", gather)
    monkeypatch.setattr(state.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(state, "send_bytes", send)
    monkeypatch.setattr(state, "receive_bytes", receive)
    fits = state._Fits()
    fits.finished = {0: MINE} if have[rank] else {}
    assert fits.share_finished() == (MINE if any(have) else None)
    assert (sent, received) == (receivers, sources)
