"""Before the first step the ranks agree on who holds the same, and that it is the same."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from checkpointless.inprocess import UnrecoverableError
from checkpointless.state.rank_local import agreement
from checkpointless.state.rank_local.agreement import require_agreement
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

EVERYBODY, ROWS = (0, 1, 2, 3), ((0, 1), (2, 3))


def a_rank(number: int, shared: Group | None = EVERYBODY) -> MadeUpState:
    """Return the state of a rank that holds the weight with ``shared``, and the rest with its row."""
    live = MadeUpState(0)
    live.all_holders = ROWS[number // 2]
    live.held_by = {WEIGHT: shared} if shared is not None else {}
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


HELP = (
    "give it the same values before training (seed the ranks alike, or broadcast it), or say which ranks hold the "
    "same (group=)"
)


def test_what_the_same_ranks_hold_is_the_same_and_buffers_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet([a_rank(number) for number in range(4)], monkeypatch) == [""] * 4


@pytest.mark.parametrize(
    ("key", "wrong", "reason"),
    [
        (WEIGHT, 2, "ranks 0, 1, 2, 3 are to hold the same model.0.weight, {} rank 2 than on rank 0: {}"),
        (MOMENTUM, 3, "ranks 2, 3 are to hold the same {name}, {} rank 3 than on rank 2: {}"),
    ],
    ids=["of-all", "of-a-row"],
)
def test_a_tensor_that_is_a_ranks_own_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: Key, wrong: int, reason: str
) -> None:
    states = [a_rank(number) for number in range(4)]
    states[wrong].present[key].fill_(9)
    name = ".".join(map(str, key))
    expected = reason.format("and it begins with other values on", HELP, name=name)
    assert meet(states, monkeypatch) == [expected] * 4
