"""Replication strategies refuse what can never be, need no process group, and plan to use every copy."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.local_checkpoint import LazyCliqueReplicationStrategy, NoReplicasAvailableError
from checkpointless.replication.local_checkpoint.replication import _ExchangePlan, _PartTransfer, _plan_retrieval

PARTS = [f"part_{number}" for number in range(5)]
having = st.dictionaries(st.integers(0, 7), st.sets(st.sampled_from(PARTS)))


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


@given(st.sets(st.integers(0, 7), min_size=1), having, having)
def test_a_plan_serves_every_wish_from_all_members_that_have_it(
    members: set[int], available: dict[int, set[str]], wanted: dict[int, set[str]]
) -> None:
    wishes = [(receiver, part) for receiver in sorted(members) for part in sorted(wanted.get(receiver, ()))]
    holders = {
        (receiver, part): {rank for rank in members - {receiver} if part in available.get(rank, ())}
        for receiver, part in wishes
    }
    if all(holders.values()):
        plan = _plan_retrieval(sorted(members), available, wanted)
        assert [(each.receiver, each.id) for each in plan.transfers] == wishes
        assert all(set(each.holders) == holders[each.receiver, each.id] for each in plan.transfers)
        assert all(list(each.holders) == sorted(each.holders) for each in plan.transfers)
    else:
        receiver, part = next(wish for wish in wishes if not holders[wish])
        with pytest.raises(NoReplicasAvailableError, match=rf"rank {receiver} has no copy of {part}"):
            _plan_retrieval(sorted(members), available, wanted)


@given(st.permutations([0, 2, 4]), having)
def test_every_member_makes_the_same_plan(order: list[int], available: dict[int, set[str]]) -> None:
    everything = {rank: [*available.get(rank, ()), PARTS[0]] for rank in (0, 2)}
    wanted = {4: [PARTS[0], PARTS[0]]}
    assert _plan_retrieval(order, everything, wanted) == _ExchangePlan((_PartTransfer(PARTS[0], 4, (0, 2)),))
