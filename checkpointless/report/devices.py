"""What was wrong with the devices of a run's nodes, and what was done about it, as its events say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import Event


@dataclass(frozen=True)
class DeviceTrouble:
    """One thing that was wrong with a device of a node.

    Attributes:
        node: number of the node, as its agent was started.
        device: the device, for people.
        what: what was wrong with it.
        is_fatal: whether it must not be used.
        remedies: what was done because of the device: ``give_up`` (a spare took the node's place), ``try`` (a
            process was started on it once more) and ``end`` (the job ended).
    """

    node: int
    device: str
    what: str
    is_fatal: bool
    remedies: tuple[str, ...] = ()


def device_troubles(events: Sequence[Event]) -> tuple[DeviceTrouble, ...]:
    """Return what was wrong with devices, in the order in which it was found."""
    remedies: dict[str, list[str]] = {}
    for event in events:
        if event.stage == EventName.BAD_DEVICE:
            remedies.setdefault(str(event.fields.get("device")), []).append(str(event.fields.get("remedy")))
    found = []
    for event in sorted(events, key=lambda event: event.ts):
        if event.stage == EventName.DEVICE:
            device, is_fatal = str(event.fields.get("device")), bool(event.fields.get("is_fatal"))
            done = tuple(remedies.get(device, ())) if is_fatal else ()
            found.append(DeviceTrouble(event.node, device, str(event.fields.get("what")), is_fatal, done))
    return tuple(found)
