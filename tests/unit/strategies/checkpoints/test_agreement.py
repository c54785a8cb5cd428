"""Test what the ranks conclude of their saves, from made-up words of every rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nemo.lightning", reason="needs NeMo")

from checkpointless.integrations.lightning.checkpoints.saves import _Agreement
from tests.drawn import examples

pytestmark = pytest.mark.nemo


def says(
    *again: list[Any], pending: tuple[int, ...] = (), failed: tuple[int, ...] = (), newest: int = 0
) -> dict[str, Any]:
    """Return what one rank says; every pending or failed save has a path."""
    paths = [[number, f"/c/{number}"] for number in (*pending, *failed)]
    said = {"again": list(again), "pending": list(pending), "newest": newest}
    return {**said, "failed": list(failed), "paths": paths}


def test_a_save_that_all_have_writers_of_goes_on() -> None:
    agreed = _Agreement.of([says(["/c/0", 0, True, False], pending=(0,))] * 2, in_background=True)
    assert agreed.whole == {"/c/0": 0}
    assert (agreed.continues, agreed.going_on, agreed.lost) == (True, {"/c/0"}, frozenset())


def test_a_save_that_one_rank_has_lost_the_writer_of_is_made_again() -> None:
    here, there = says(["/c/0", 0, True, False], pending=(0,)), says(["/c/0", 0, True, False])
    agreed = _Agreement.of([here, there], in_background=True)
    assert (agreed.again, agreed.whole, agreed.in_vain) == ({"/c/0"}, {}, {0})
    assert not agreed.lost


def test_a_save_from_before_the_moment_is_lost_with_one_writer() -> None:
    agreed = _Agreement.of([says(pending=(3,), newest=3), says(newest=3)], in_background=True)
    assert agreed.is_cut_off
    assert not agreed.continues
    assert (agreed.lost, agreed.forgotten, agreed.lost_paths) == ({3}, {3}, ("/c/3",))


def test_a_save_whose_writer_failed_is_lost_and_the_others_go_on() -> None:
    agreed = _Agreement.of([says(pending=(4,), failed=(3,)), says(pending=(4,))], in_background=True)
    assert (agreed.failed, agreed.lost, agreed.going_on) == ({3}, {3}, {"/c/4"})
    assert agreed.continues


@pytest.mark.parametrize(("first", "whole"), [(True, {"/c/a": None}), (False, {})])
def test_a_save_that_is_made_at_once_is_whole_with_the_part_of_the_first(
    first: bool, whole: dict[str, None]
) -> None:
    agreed = _Agreement.of(
        [says(["/c/a", None, first, False]), says(["/c/a", None, True, False])], in_background=False
    )
    assert agreed.whole == whole


NUMBERS = st.lists(st.integers(0, 3), unique=True).map(tuple)
SAVES = st.lists(
    st.tuples(st.sampled_from(["/c/a", "/c/b"]), st.none() | st.integers(0, 3), st.booleans(), st.booleans()).map(
        list
    ),
    unique_by=lambda save: save[0],
    max_size=2,
)
WORDS = st.builds(
    lambda again, pending, failed: says(*again, pending=pending, failed=failed), SAVES, NUMBERS, NUMBERS
)


@examples(200)
@given(everyone=st.lists(WORDS, min_size=1, max_size=3), in_background=st.booleans())
def test_no_save_is_both_lost_and_going_on(everyone: list[dict[str, Any]], in_background: bool) -> None:
    agreed = _Agreement.of(everyone, in_background)
    assert agreed.whole.keys() <= agreed.again
    assert not agreed.going_on & set(agreed.lost_paths)
    assert agreed.forgotten <= agreed.lost
    assert not (agreed.continues and agreed.is_cut_off)
