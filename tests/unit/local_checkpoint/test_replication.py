"""Replication strategies refuse what can never be, and need no process group to be made."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from checkpointless.replication.local_checkpoint import LazyCliqueReplicationStrategy


def test_the_lazy_strategy_needs_no_process_group_to_be_made() -> None:
    assert not dist.is_initialized()
    strategy = LazyCliqueReplicationStrategy(replication_jump=2, replication_factor=3)
    assert (strategy.replication_jump, strategy.replication_factor) == (2, 3)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        _ = strategy.replication_strategy


@pytest.mark.parametrize(("jump", "factor"), [(-1, 2), (0, 0)])
def test_the_lazy_strategy_refuses_at_once_what_can_never_be(jump: int, factor: int) -> None:
    with pytest.raises(ValueError, match="0 or more and replication_factor 1 or more"):
        LazyCliqueReplicationStrategy(jump, factor)
