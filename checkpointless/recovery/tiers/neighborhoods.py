"""How far apart the ranks are that keep each other's copies: on other nodes, and with other shards, if possible."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from checkpointless.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.inprocess import UnrecoverableError
from checkpointless.local_checkpoint.agreement import gather
from checkpointless.local_checkpoint.cliques import clique_of
from checkpointless.recovery.tiers.tier import Tier

logger = logging.getLogger(__name__)


def neighborhoods(tiers: Sequence[Tier], group: Sequence[int]) -> Mapping[str, int]:
    """Return how many ranks apart each tier's copies are, by the name of the tier. Collective.

    Ranks that hold the same shard are bad neighbors: if all holders of a shard are lost, so are its copies. Unless
    a tier says itself how far apart its copies are, another distance is looked for then.

    Args:
        tiers: the tiers.
        group: the ranks that hold the same shard as this one, this one included.

    Raises:
        UnrecoverableError: the ranks cannot be divided as a tier wants; the message says what is possible.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = gather(int(os.environ.get(LOCAL_WORLD_SIZE_ENV, world)))
    node = int(sizes[0])
    if len(set(sizes)) > 1 and any(tier.copies and not tier.jump for tier in tiers):
        raise UnrecoverableError(
            f"nodes have different numbers of ranks, {sorted(set(sizes))}: say with jump how far apart copies are"
        )
    possible = {}
    for tier in tiers:
        try:
            possible[tier.name] = tier.distances(world, node)
        except ValueError as error:
            raise UnrecoverableError(str(error)) from error

    def is_bad(tier: Tier, jump: int) -> bool:
        return len(group) > 1 and set(clique_of(rank, world, jump, tier.copies + 1)) <= {*group}

    mine = {tier.name: [is_bad(tier, jump) for jump in possible[tier.name]] for tier in tiers if tier.copies}
    told = gather({name: list(each) for name, each in mine.items()})
    found = {}
    for tier in tiers:
        jumps = possible[tier.name]
        good = [
            jump
            for place, jump in enumerate(jumps)
            if not tier.copies or not any(each[tier.name][place] for each in told)
        ]
        found[tier.name] = (good or jumps)[0]
        if not good and rank == 0:
            logger.warning(
                "%s: copies are kept by ranks that hold the same shard, %d ranks apart, and are lost with them: "
                "give another jump",
                tier.name,
                jumps[0],
            )
    return found
