"""Start a coordinator in node 0's agent or in a separate process (``checkpointless coordinator``)."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable

from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.job import FAILED
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.coordinator.listener import CoordinatorPort
from checkpointless.launcher.protocol.causes import signal_name
from checkpointless.launcher.protocol.channel import resolve
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.system.awake_clock import AwakeClock

logger = logging.getLogger(__name__)

TICK_S = 0.05
FAREWELL_S = 10.0  # for the agents to hear that the job is over


def host(
    config: JobConfig,
    selector: selectors.BaseSelector,
    events: EventLog,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> tuple[Coordinator, CoordinatorPort]:
    """Create a coordinator that listens for agents in the loop of ``selector`` and measures limits with ``clock``.

    Raises:
        OSError: the address cannot be resolved or listened on.
    """
    name, port = config.endpoint
    address = resolve(name)
    if address.startswith("127.") and not name.startswith(("127.", "localhost")):
        say(f"{name} is {address} here, which no other node can reach: use an address of this node's own")
    coordinator = Coordinator(config, events=events, say=say, clock=clock)
    door = CoordinatorPort(
        address,
        port,
        token=config.token,
        coordinator=coordinator,
        selector=selector,
        silence_s=config.node_timeout_s,
        clock=clock,
    )
    return coordinator, door


def coordinate(
    config: JobConfig,
    events: EventLog,
    say: Callable[[str], None],
    signals: list[int],
    look: Callable[[Coordinator, float], None] | None = None,
) -> int:
    """Coordinate a job from this process until it is over.

    Args:
        config: what is asked of the job.
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
    coordinator, door = host(config, selector, events, say, clock)
    say(f"coordinating {config.nnodes} nodes of {config.nproc_per_node} ranks at {config.endpoint[0]}:{door.port}")
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
