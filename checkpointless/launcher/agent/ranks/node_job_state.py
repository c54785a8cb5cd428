"""What a node knows of the job that its ranks take part in."""

from __future__ import annotations

import time

from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.node_messages import End
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Edge, EventLog


class NodeJobState:
    """The job as the coordinator has told it to this node.

    Args:
        events: the job's event log.

    Attributes:
        generation: the generation that began last (-1: none).
        began_after: the highest step that was known to be committed when the generation began.
        incident: the incident that the coordinator spoke of last; None if the generation began without one.
        run_id: the job's name in the environment of ranks.
        finished: whether every rank's block has returned, on this node and all others.
        outcome: how the job ended; None until it has.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.generation = -1
        self.began_after = NO_STEP
        self.incident: str | None = None
        self.run_id = ""
        self.finished = False
        self.outcome: End | None = None
        self._told: tuple[str, float] = ("", 0.0)  # an incident, and when its fault happened

    def interrupt(self, incident: str, fault_at_s: float) -> None:
        """Note the incident that ends the generation.

        Args:
            fault_at_s: when the fault happened, as far as that is known, on the monotonic clock.
        """
        self.incident = incident
        self._told = incident, fault_at_s

    def fault_at(self, incident: str) -> float:
        """Return when the fault of an incident happened, on the monotonic clock: now if this node knows of none."""
        told_of, at_s = self._told
        return at_s if told_of == incident else time.monotonic()

    def emit(self, stage: EventName, edge: Edge, *, rank: int | None = None, **fields: object) -> None:
        """Write an event of the generation and incident that this node knows of."""
        generation = max(self.generation, 0)
        self._events.emit(stage, edge, generation=generation, incident=self.incident, rank=rank, **fields)

    def emit_preload(self, seconds: float, failed: tuple[str, ...]) -> None:
        """Write that this node has imported what its ranks need, before any generation.

        Args:
            seconds: how long that took.
            failed: names that could not be imported.
        """
        self._events.emit(EventName.PRELOAD, "point", generation=0, seconds=seconds, failed=failed)
