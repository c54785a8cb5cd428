"""Copies of a step are of this training only if no later generation has made the step again."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.parts import SaveId
from checkpointless.replication.tiers import _Lineage

JOB = "0123456789abcdef"
FIRST = _Lineage(JOB).begin(0, 0)


def named(step: int, generation: int) -> SaveId:
    return SaveId(step, f"{JOB}{generation:08x}")


def test_what_was_made_before_all_that_is_known_has_no_name() -> None:
    lineage = FIRST
    for generation in range(1, 400):
        lineage = lineage.begin(generation, generation)
    assert lineage.save(400) == named(400, 399)
    assert lineage.save(1) is None, "it is not known any more whether another generation made it again"
    assert len(lineage.begun) == 256


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
    told = json.loads(json.dumps(msgspec.to_builtins(lineage)))
    assert msgspec.convert(told, _Lineage) == lineage
    assert lineage.newest == 1
    assert _Lineage(JOB).newest == -1


@pytest.mark.parametrize("plain", [None, "job", ["short", []], [JOB, [[1]]], [JOB, [["a", "b"]]]])
def test_anything_else_is_refused(plain: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, _Lineage)
