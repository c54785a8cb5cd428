"""One timeline for the events of all processes of a job, whatever became of their wall clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import TYPE_CHECKING

from checkpointless.observability.telemetry.event_names import EventName

if TYPE_CHECKING:
    from checkpointless.observability.telemetry.events import Event

_SAME_NS = 1_000_000_000  # clocks that are this close are taken to agree


@dataclass
class _Host:
    """A monotonic clock that a node's processes share.

    Attributes:
        ahead: by how much the wall clock was ahead of it, by each event.
        offset: what has to be added to it to get to the common timeline.
    """

    ahead: list[int] = field(default_factory=list)
    offset: int = 0


def on_one_timeline(events: Sequence[Event]) -> list[Event]:
    """Return the events with times (``ts``) whose differences can be believed.

    Within a node they are those of the monotonic clock, so a wall clock that is set, or that differs from process
    to process, changes no duration. Across nodes they are those of the wall clocks, unless these differ by more
    than a second: all ranks enter a generation when the coordinator lets them, which shows by how much.

    Args:
        events: events of a run in the order in which they were written.
    """
    placed = _placed(events)
    for host in {id(host): host for _, host in placed}.values():
        host.offset = median_low(host.ahead)
    _align(placed)
    return [replace(event, ts=event.mono + host.offset) for event, host in placed]


def _placed(events: Iterable[Event]) -> list[tuple[Event, _Host]]:
    """Return each event with its host.

    A node has one, unless another machine took its place. If wall clock and monotonic clock disagree about the time
    since the event before, the wall clock was set if it shows the longer time, and else it is another machine.
    """
    known: defaultdict[int, list[tuple[int, _Host]]] = defaultdict(list)  # by node: hosts by their offsets
    last: dict[int, tuple[Event, _Host]] = {}
    found = []
    for event in events:
        ahead = event.ts - event.mono
        host = next((each for other, each in known[event.node] if abs(ahead - other) <= _SAME_NS), None)
        if host is None:
            before, same = last.get(event.node, (None, None))
            was_set = before is not None and abs(event.mono - before.mono) <= abs(event.ts - before.ts)
            host = same if was_set and same is not None else _Host()
            known[event.node].append((ahead, host))
        host.ahead.append(ahead)
        last[event.node] = event, host
        found.append((event, host))
    return found


def _align(placed: Sequence[tuple[Event, _Host]]) -> None:
    """Set right the hosts whose wall clocks disagree with the coordinator's."""
    begun = {
        each.generation: (host, each.mono + host.offset) for each, host in placed if each.stage == EventName.GO
    }
    least: dict[int, tuple[_Host, int]] = {}
    for event, host in placed:
        if event.stage != EventName.BARRIER or event.edge != "end":
            continue
        # Who waited because of a fault names the generation that the fault ended.
        coordinator, at = begun.get(event.generation + (event.incident is not None), (host, 0))
        if coordinator is not host:
            gap = event.mono + host.offset - at
            least[id(host)] = host, min(gap, least.get(id(host), (host, gap))[1])
    for host, gap in least.values():
        host.offset -= gap if abs(gap) > _SAME_NS else 0
