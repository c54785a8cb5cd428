"""The loop of ``checkpointless run``: the agent of this node, and the coordinator where it lives here."""

from __future__ import annotations

import selectors
import time
from collections import deque

from checkpointless.agent.coordinator import Coordinator
from checkpointless.agent.node import NodeAgent
from checkpointless.agent.node_protocol import Command, End, NodeMessage

TICK_S = 0.05


class LocalLink:
    """Connects the agent of a node with a coordinator in the same loop: by messages, as a connection would."""

    def __init__(self) -> None:
        self._reports: deque[NodeMessage] = deque()
        self._commands: deque[Command] = deque()

    def report(self, message: NodeMessage) -> None:
        """Take what the agent tells the coordinator."""
        self._reports.append(message)

    def command(self, command: Command) -> None:
        """Take what the coordinator tells the agent."""
        self._commands.append(command)

    def deliver(self, agent: NodeAgent, coordinator: Coordinator) -> None:
        """Hand over all that waits, and what comes of it, until nothing does."""
        node = coordinator.nodes[agent.index]
        while self._reports or self._commands:
            while self._reports:
                coordinator.hear(node, self._reports.popleft())
            while self._commands:
                agent.obey(self._commands.popleft())


def serve(
    agent: NodeAgent,
    coordinator: Coordinator,
    link: LocalLink,
    selector: selectors.BaseSelector,
    signals: list[int],
) -> End:
    """Run a job on one node until every rank's process has ended.

    Args:
        agent: of the node.
        coordinator: of the job.
        link: between the two.
        selector: which the agent registers its descriptors with; the data of each is called when it is readable.
        signals: the signals that this process got; a handler appends to it.

    Returns:
        How the job ended.
    """
    coordinator.connect(agent.index, link.command)
    try:
        while agent.outcome is None or agent.alive():
            for key, _ in selector.select(TICK_S):
                key.data()
            now_s = time.monotonic()
            while signals:
                agent.interrupted(signals.pop(0))
            agent.tick(now_s)
            link.deliver(agent, coordinator)
            coordinator.tick(now_s)
            link.deliver(agent, coordinator)
        return agent.outcome
    finally:
        selector.close()
        agent.close()
        coordinator.close()
