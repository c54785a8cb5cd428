"""Test who waits for whom, by what each rank has launched."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.hang_watch import _ahead_and_behind, _Stance, _stances_of
from checkpointless.launcher.protocol.messages import Answer

WAITS, ELSEWHERE, UNCLEAR = _Stance.WAITS, _Stance.ELSEWHERE, _Stance.UNCLEAR


def on_gpus(launched: Mapping[int, Mapping[str, int]], *in_collective: int) -> dict[int, _Stance]:
    """Return the stances of ranks on GPUs."""
    answers = {rank: Answer(0, rank in in_collective, "", True, dict(each)) for rank, each in launched.items()}
    return _stances_of(answers, is_complete=True)


def test_who_waits_for_one_that_waits_is_no_culprit() -> None:
    """Rank 3 hangs; rank 2 waits for it in their tensor-parallel group, and ranks 0 and 1 for rank 2 or 3."""
    launched = {
        0: {"world": 10, "tp 0": 5, "dp 0": 4},
        1: {"world": 10, "tp 0": 5, "dp 1": 4},
        2: {"world": 10, "tp 1": 5, "dp 0": 3},
        3: {"world": 10, "tp 1": 4, "dp 1": 3},
    }
    assert on_gpus(launched) == {0: WAITS, 1: WAITS, 2: WAITS, 3: ELSEWHERE}


def test_a_stage_of_a_pipeline_is_waited_for_by_its_neighbours() -> None:
    """Stage 1 hangs: stage 0 wants to send to it again, stage 2 to receive from it."""
    launched = {
        0: {"world": 3, "pp/0>1": 5},
        1: {"world": 3, "pp/0>1": 4, "pp/1>2": 3},
        2: {"world": 3, "pp/1>2": 4, "pp/2>3": 3},
        3: {"world": 3, "pp/2>3": 4},
        4: {"world": 4},
    }
    assert on_gpus(launched) == {0: WAITS, 1: ELSEWHERE, 2: WAITS, 3: WAITS, 4: WAITS}


@pytest.mark.parametrize(
    "launched",
    [
        {0: {"0": 4}, 1: {"0": 4}},  # the network, perhaps
        {0: {}, 1: {}},
        {0: {"0": 4}, 1: {"0": 4}, 2: {"0": 5}},  # they may wait for each other in what nobody counts
    ],
)
def test_without_evidence_nobody_is_accused(launched: Mapping[int, Mapping[str, int]]) -> None:
    assert ELSEWHERE not in on_gpus(launched).values()


def test_who_is_behind_may_wait_for_one_that_has_not_answered() -> None:
    """Rank 1 waits for rank 2, which still beats and was not asked, and rank 0 waits for rank 1."""
    launched = {0: {"a": 5}, 1: {"a": 4, "b": 3}}
    answers = {rank: Answer(0, False, "", True, dict(each)) for rank, each in launched.items()}
    assert _stances_of(answers, is_complete=False) == {0: WAITS, 1: UNCLEAR}


def test_where_calls_return_when_they_are_done_the_stack_is_the_evidence() -> None:
    answers = {0: Answer(0, True, "", False, {"0": 5}), 1: Answer(0, False, "", False, {"0": 5})}
    assert _stances_of(answers, is_complete=False) == {0: WAITS, 1: ELSEWHERE}


def pairs(launched: Mapping[int, Mapping[str, int]], rank: int) -> list[tuple[int, int]]:
    """Return each count of a rank, paired with that of each rank in the same group."""
    return [
        (count, other[group])
        for group, count in launched[rank].items()
        for other in launched.values()
        if group in other
    ]


@given(
    st.dictionaries(
        st.integers(0, 6), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3), max_size=7
    )
)
def test_who_is_behind_is_waited_for_and_waits_for_nobody(launched: Mapping[int, Mapping[str, int]]) -> None:
    waiting, late = _ahead_and_behind(launched)
    assert not waiting & late
    assert late <= set(launched)
    for rank in late:
        assert any(theirs > mine for mine, theirs in pairs(launched, rank))
    for rank in waiting:
        assert any(theirs < mine for mine, theirs in pairs(launched, rank))
