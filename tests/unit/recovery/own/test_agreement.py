"""Before the first step the ranks agree on who holds the same, and that it is the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.own import agreement
from checkpointless.recovery.own.agreement import require_agreement
from checkpointless.transfer.rank_groups import Group
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

EVERYBODY, ROWS = (0, 1, 2, 3), ((0, 1), (2, 3))


def told_by(live: MadeUpState, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a rank with this state tells the others."""
    told: list[Any] = []

    def gather(mine: Any) -> Any:
        told.append(json.loads(json.dumps(mine)))
        raise InterruptedError

    monkeypatch.setattr(agreement, "all_gather_json", gather)
    with pytest.raises(InterruptedError):
        require_agreement(live, [BUFFER])
    return told[0]


def a_rank(number: int, shared: Group | None = EVERYBODY) -> MadeUpState:
    """Return the state of a rank that holds the weight with ``shared``, and the rest with its row."""
    live = MadeUpState(0)
    live.all_holders = ROWS[number // 2]
    live.holders = {WEIGHT: shared} if shared is not None else {}
    live.present[MOMENTUM].fill_(number // 2)
    live.present[BUFFER].fill_(number)
    return live


def meet(states: list[MadeUpState], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [told_by(state, monkeypatch) for state in states]
    monkeypatch.setattr(agreement, "all_gather_json", lambda mine: answers)
    require_agreement(states[0], [BUFFER])


def test_what_the_same_ranks_hold_is_the_same_and_the_rest_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    meet([a_rank(number) for number in range(4)], monkeypatch)
    states = [a_rank(number) for number in range(4)]
    states[1].present[MOMENTUM].fill_(9)  # the one part of a rank is compared by checksums, if they are on
    meet(states, monkeypatch)


def test_a_weight_that_is_a_ranks_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [a_rank(number) for number in range(4)]
    states[2].present[WEIGHT].fill_(9)
    reason = (
        r"ranks 0, 1, 2, 3 are to hold the same \(model\.0\.weight and .*\), and ranks 0 and 2 begin with different"
    )
    with pytest.raises(UnrecoverableError, match=reason):
        meet(states, monkeypatch)


def test_ranks_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [a_rank(number, None if number == 3 else EVERYBODY) for number in range(4)]
    with pytest.raises(UnrecoverableError, match=r"of ranks 0, 1, 2, 3, rank 3 says something else"):
        meet(states, monkeypatch)
