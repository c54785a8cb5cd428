"""Which devices must not be used, by the user's check, and what was done about it, as the events of a run say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import Event


@dataclass(frozen=True)
class BadDevice:
    """A device check that failed.

    Attributes:
        node: number of the node in the job, as the coordinator wrote it.
        rank: the rank that was to be started.
        why: how the check failed.
        remedy: what was done: ``give_up`` (a spare took the node's place) or ``try`` (the rank was started).
    """

    node: str
    rank: int | None
    why: str
    remedy: str


def bad_devices(events: Sequence[Event]) -> tuple[BadDevice, ...]:
    """Return the device checks that failed, in their order."""
    return tuple(
        BadDevice(
            str(event.fields.get("node_number")),
            event.rank,
            str(event.fields.get("why")),
            str(event.fields.get("remedy")),
        )
        for event in sorted(events, key=lambda event: event.ts)
        if event.stage == EventName.BAD_DEVICE
    )
