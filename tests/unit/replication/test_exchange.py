"""Cliques divide the job into failure domains."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.exchange import _all_cliques, check_layout, clique_of

layouts = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4)).map(
    lambda each: (each[0] * each[1] * each[2], each[1], each[2])
)


@given(layouts)
def test_every_rank_is_in_one_clique_of_the_right_size(layout: tuple[int, int, int]) -> None:
    world, jump, factor = layout
    cliques = {clique_of(rank, world, jump, factor) for rank in range(world)}
    assert _all_cliques(world, jump, factor) == sorted(cliques)
    assert sorted(rank for clique in cliques for rank in clique) == list(range(world))
    assert {len(clique) for clique in cliques} == {factor}
    for clique in cliques:
        assert all(clique_of(member, world, jump, factor) == clique for member in clique)
        assert all(after - before == jump for before, after in pairwise(clique))


@given(layouts)
def test_with_nodes_as_large_as_the_jump_no_two_members_are_on_one_node(layout: tuple[int, int, int]) -> None:
    world, jump, factor = layout
    for rank in range(world):
        nodes = [member // jump for member in clique_of(rank, world, jump, factor)]
        assert len(set(nodes)) == factor


@given(layouts)
def test_the_documented_formula(layout: tuple[int, int, int]) -> None:
    world, jump, factor = layout
    firsts = [a * jump * factor + b for a in range(world // (jump * factor)) for b in range(jump)]
    expected = [tuple(first + step * jump for step in range(factor)) for first in firsts]
    found = sorted({clique_of(rank, world, jump, factor) for rank in range(world)})
    assert found == sorted(expected)


def test_the_documented_example() -> None:
    cliques = {clique_of(rank, 32, 8, 2) for rank in range(32)}
    assert cliques == {(rank, rank + 8) for rank in [*range(8), *range(16, 24)]}


@pytest.mark.parametrize(("world", "jump", "factor"), [(6, 2, 2), (4, 4, 2), (3, 1, 2), (2, 1, 4)])
def test_a_world_that_cannot_be_divided(world: int, jump: int, factor: int) -> None:
    with pytest.raises(
        ValueError, match=f"{world} ranks cannot be divided .* = {jump * factor}.*replication_jump=1"
    ):
        clique_of(0, world, jump, factor)


@pytest.mark.parametrize(("jump", "factor"), [(0, 2), (-1, 2), (1, 0)])
def test_distances_and_sizes_are_positive(jump: int, factor: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        check_layout(4, jump, factor)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="rank 4 is not one of the 4 ranks"):
        clique_of(4, 4, 1, 2)
