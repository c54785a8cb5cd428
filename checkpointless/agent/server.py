"""The loop of ``checkpointless run``: it runs this node's agent, and links it to the coordinator."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from checkpointless.agent.links import Link
from checkpointless.agent.node import NodeAgent
from checkpointless.agent.watch import Watch
from checkpointless.coordinator.hosting import TICK_S
from checkpointless.posix.signals import CUT_SIGNAL
from checkpointless.wire.node_messages import End


def serve(
    agent: NodeAgent,
    link: Link,
    selector: selectors.BaseSelector,
    signals: list[int],
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> End:
    """Run a node's part of a job until every rank's process has ended.

    Args:
        agent: the agent of this node.
        link: the agent's link to the coordinator.
        selector: selector with which both register their descriptors; the data of a descriptor's key is called when
            the descriptor is ready.
        signals: the signals that this process got; a handler appends to it.
        watch: looks at the job in every turn of the loop.
        clock: clock with which limits are measured.

    Returns:
        How the job ended.
    """
    try:
        while agent.outcome is None or agent.alive() or link.is_needed(clock()):
            for key, _ in selector.select(TICK_S):
                key.data()
            now_s = clock()
            while signals:
                number = signals.pop(0)
                if number == CUT_SIGNAL:
                    link.cut()
                else:
                    agent.interrupted(number)
            agent.tick(now_s)
            link.deliver(agent, now_s)
            if watch is not None:
                watch.look(agent, link.coordinator, time.monotonic())
        return agent.outcome
    finally:
        agent.close()
        link.close()
        selector.close()
