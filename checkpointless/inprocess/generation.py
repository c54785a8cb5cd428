"""The generation that a rank is in, as its agent announced it at the barrier."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from checkpointless.launcher.protocol.messages import Go
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Edge, event_log
from checkpointless.system.environment import LOCAL_RANK_ENV, own_rank, own_world_size


@dataclass
class Generation:
    """The generation that this rank is in. There is one of these per process, and it changes at every barrier.

    Attributes:
        incident: id of the incident that led to this generation, or of the one that ends it, once that is known
            (None: none).
        high_water: the highest optimizer step that any rank of the job is known to have committed (-1: none).
        origin: the generation that began from nothing: 0, or that of the last restart of the whole job.
        recovering_since_s: when the fault before it happened, as far as this node knows, in monotonic-clock seconds
            (None if unknown).
    """

    number: int
    incident: str | None = None
    high_water: int = -1
    origin: int = 0
    recovering_since_s: float | None = None

    def adopt(self, go: Go) -> None:
        """Take over what the agent says of the generation that begins."""
        self.number, self.incident = go.generation, go.incident
        self.high_water, self.origin = go.high_water, go.origin

    def emit(self, stage: EventName, edge: Edge, **fields: Any) -> None:
        """Write an event of this generation and incident."""
        event_log().emit(stage, edge, generation=self.number, incident=self.incident, **fields)

    def span(self, stage: EventName, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        """Return a span of ``stage``, of this generation and incident, for a ``with`` statement."""
        return event_log().span(stage, generation=self.number, incident=self.incident, **fields)


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
