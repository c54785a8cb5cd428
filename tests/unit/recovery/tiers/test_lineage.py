"""Copies of a step are of this training only if no later generation has made the step again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.parts import SaveId
from checkpointless.replication.tiers import _Lineage

JOB = "0123456789abcdef"
FIRST = _Lineage(JOB).begin(0, 0)


def named(step: int, generation: int) -> SaveId:
    return SaveId(step, f"{JOB}{generation:08x}")


def test_a_step_is_named_after_the_generation_that_made_it() -> None:
    lineage = FIRST.begin(1, 4).begin(2, 7)
    assert [lineage.save(step) for step in (4, 5, 7, 8)] == [named(4, 0), named(5, 1), named(7, 1), named(8, 2)]


def test_a_step_that_was_made_again_is_another_one() -> None:
    lineage = FIRST.begin(1, 4).begin(2, 2)
    assert lineage.save(4) == named(4, 2)
    assert lineage.has(named(2, 0))
    assert not lineage.has(named(4, 0))
    assert not lineage.has(named(5, 1))


def test_copies_of_another_job_are_of_no_use() -> None:
    assert not FIRST.has(SaveId(3, "f" * 16 + "0" * 8))


def test_what_was_made_before_all_that_is_known_has_no_name() -> None:
    lineage = FIRST
    for generation in range(1, 400):
        lineage = lineage.begin(generation, generation)
    assert lineage.save(400) == named(400, 399)
    assert lineage.save(1) is None, "it is not known any more whether another generation made it again"
    assert len(lineage.begun) == 256


def test_another_fit_of_a_block_goes_on_with_the_steps_of_the_one_before() -> None:
    lineage = FIRST.begin(0, 10)
    assert lineage.save(10) == named(10, 0)
    assert lineage.save(11) == named(11, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_it_names_what_a_list_of_all_steps_names(generations: list[tuple[int, int]]) -> None:
    """Each generation goes back by some steps, and makes some."""
    lineage = _Lineage(JOB)
    made: list[int] = []  # the generation that made each step
    for generation, (back, forth) in enumerate(generations):
        del made[max(0, len(made) - back) :]
        lineage = lineage.begin(generation, len(made))
        made += [generation] * forth
        for step, maker in enumerate(made, start=1):
            assert lineage.save(step) == named(step, maker)
            assert lineage.has(named(step, maker))
            assert not any(lineage.has(named(step, other)) for other in range(generation + 1) if other != maker)


def test_it_travels_as_plain_data() -> None:
    lineage = FIRST.begin(1, 4)
    assert _Lineage.from_json(lineage.to_json()) == lineage
    assert lineage.newest == 1
    assert _Lineage(JOB).newest == -1


@pytest.mark.parametrize("plain", [None, "job", [JOB], ["short", []], [JOB, [[1]]], [JOB, [["a", "b"]]]])
def test_anything_else_is_refused(plain: object) -> None:
    with pytest.raises(ValueError, match="not a lineage"):
        _Lineage.from_json(plain)
