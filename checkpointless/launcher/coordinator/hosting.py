"""Start a coordinator in node 0's agent or in a separate process (``checkpointless coordinator``)."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.job import FAILED
from checkpointless.launcher.coordinator.limits import Limits
from checkpointless.launcher.coordinator.listener import CoordinatorPort
from checkpointless.launcher.protocol.causes import signal_name
from checkpointless.launcher.protocol.channel import resolve
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.system.awake_clock import AwakeClock

logger = logging.getLogger(__name__)

TICK_S = 0.05
FAREWELL_S = 10.0  # for the agents to hear that the job is over


@dataclass(frozen=True)
class Meeting:
    """Where the agents of a job meet, and which agents may take part.

    Attributes:
        nnodes: how many nodes train.
        nproc: how many ranks each node runs.
        address: the address to listen on; the ranks are also told to meet there.
        port: the port to listen on.
        token: a secret that only the agents of this job know.
        silence_s: after how many seconds without a message a node is lost.
    """

    nnodes: int
    nproc: int
    address: str
    port: int
    token: str
    silence_s: float


def host(
    meeting: Meeting,
    limits: Limits,
    selector: selectors.BaseSelector,
    events: EventLog,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> tuple[Coordinator, CoordinatorPort]:
    """Create a coordinator that listens for agents in the loop of ``selector`` and measures limits with ``clock``.

    Raises:
        OSError: the address cannot be resolved or listened on.
    """
    address = resolve(meeting.address)
    if address.startswith("127.") and not meeting.address.startswith(("127.", "localhost")):
        say(
            f"{meeting.address} is {address} here, which no other node can reach: use an address of this node's own"
        )
    nnodes, nproc = meeting.nnodes, meeting.nproc
    coordinator = Coordinator(limits, nnodes=nnodes, nproc=nproc, events=events, say=say, clock=clock)
    door = CoordinatorPort(
        address,
        meeting.port,
        token=meeting.token,
        coordinator=coordinator,
        selector=selector,
        silence_s=meeting.silence_s,
        clock=clock,
    )
    return coordinator, door


def coordinate(
    meeting: Meeting,
    limits: Limits,
    events: EventLog,
    say: Callable[[str], None],
    signals: list[int],
    look: Callable[[Coordinator, float], None] | None = None,
) -> int:
    """Coordinate a job from this process until it is over.

    Args:
        meeting: where the agents meet, and which agents may take part.
        limits: the limits on ranks, nodes and incidents.
        events: the job's event log.
        say: called with lines for the terminal.
        signals: the signals that this process has received, appended by a handler. The first one ends the job.
        look: looks at the job in every turn of the loop; called with the monotonic time in seconds.

    Returns:
        0 if every rank ended well; the code of a rank that gave the job up; 1 otherwise.

    Raises:
        OSError: the address cannot be resolved or listened on.
    """
    selector = selectors.DefaultSelector()
    clock = AwakeClock()
    coordinator, door = host(meeting, limits, selector, events, say, clock)
    say(f"coordinating {meeting.nnodes} nodes of {meeting.nproc} ranks at {meeting.address}:{door.port}")
    until_s = float("inf")
    try:
        while coordinator.outcome is None or (door.has_guests() and clock() < until_s):
            for key, _ in selector.select(TICK_S):
                key.data()
            now_s = clock()
            while signals:
                coordinator.end(FAILED, f"stopped by {signal_name(signals.pop(0))}")
            door.tick(now_s)
            coordinator.tick(now_s)
            if look is not None:
                look(coordinator, time.monotonic())
            if coordinator.outcome is not None and until_s == float("inf"):
                until_s = now_s + FAREWELL_S
        for line in coordinator.outcome.last_words:
            say(line)
        return coordinator.outcome.code
    finally:
        door.close()
        selector.close()
