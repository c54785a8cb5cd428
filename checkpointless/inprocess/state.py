"""The plain facts about a rank that aborts, clean-ups and health checks receive."""

from __future__ import annotations

import os
from dataclasses import dataclass

from checkpointless.system.environment import LOCAL_RANK_ENV, own_rank, own_world_size


@dataclass(frozen=True)
class HPState:
    """A rank's place in the job while it restarts.

    Attributes:
        rank: global rank.
        world_size: number of ranks in the job.
        local_rank: rank within this node.
        generation: the generation that is over.
        incident: id of the incident being handled, or None.
    """

    rank: int
    world_size: int
    local_rank: int
    generation: int
    incident: str | None = None

    @classmethod
    def from_environment(cls, generation: int, incident: str | None = None) -> HPState:
        """Create the state from torchrun's environment variables (a lone process is rank 0 of 1)."""
        return cls(
            rank=own_rank(),
            world_size=own_world_size(),
            local_rank=int(os.environ.get(LOCAL_RANK_ENV, "0")),
            generation=generation,
            incident=incident,
        )
