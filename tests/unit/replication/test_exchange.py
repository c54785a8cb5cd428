"""Cliques divide the job into failure domains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.exchange import cliques_of


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_every_rank_is_in_one_clique_with_ranks_of_other_nodes(blocks: int, jump: int, factor: int) -> None:
    world = blocks * jump * factor
    cliques = cliques_of(world, jump, factor)
    assert sorted(rank for clique in cliques for rank in clique) == list(range(world))
    firsts = [a * jump * factor + b for a in range(blocks) for b in range(jump)]
    assert cliques == [tuple(first + step * jump for step in range(factor)) for first in firsts], "as documented"


def test_the_documented_example() -> None:
    assert cliques_of(32, 8, 2) == [(rank, rank + 8) for rank in [*range(8), *range(16, 24)]]


@pytest.mark.parametrize(("world", "jump", "factor"), [(6, 2, 2), (4, 4, 2), (3, 1, 2), (2, 1, 4)])
def test_a_world_that_cannot_be_divided(world: int, jump: int, factor: int) -> None:
    words = f"{world} ranks cannot be divided .* = {jump * factor}.*replication_jump=1"
    with pytest.raises(ValueError, match=words):
        cliques_of(world, jump, factor)


@pytest.mark.parametrize(("jump", "factor"), [(0, 2), (-1, 2), (1, 0)])
def test_distances_and_sizes_are_positive(jump: int, factor: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        cliques_of(4, jump, factor)
