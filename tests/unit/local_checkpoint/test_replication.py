"""Replication strategies refuse what can never be, and need no process group to be made."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.exchange import cliques_of
from checkpointless.replication.local_checkpoint import LazyCliqueReplicationStrategy


def test_the_lazy_strategy_needs_no_process_group_to_be_made() -> None:
    assert not dist.is_initialized()
    strategy = LazyCliqueReplicationStrategy(replication_jump=2, replication_factor=3)
    assert (strategy.replication_jump, strategy.replication_factor) == (2, 3)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        _ = strategy.replication_strategy


# --- Cliques divide the job into failure domains ------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_every_rank_is_in_one_clique_with_ranks_of_other_nodes(blocks: int, jump: int, factor: int) -> None:
    world = blocks * jump * factor
    cliques = cliques_of(world, jump, factor)
    assert sorted(rank for clique in cliques for rank in clique) == list(range(world))
    firsts = [a * jump * factor + b for a in range(blocks) for b in range(jump)]
    assert cliques == [tuple(first + step * jump for step in range(factor)) for first in firsts], "as documented"


@pytest.mark.parametrize(("world", "jump", "factor"), [(6, 2, 2), (4, 4, 2), (3, 1, 2), (2, 1, 4)])
def test_a_world_that_cannot_be_divided(world: int, jump: int, factor: int) -> None:
    words = f"{world} ranks cannot be divided .* = {jump * factor}.*replication_jump=1"
    with pytest.raises(ValueError, match=words):
        cliques_of(world, jump, factor)
