"""The loop of ``checkpointless run``: the agent of this node, and what connects it with the coordinator."""

from __future__ import annotations

import abc
import selectors
import time
from collections import deque

from checkpointless.agent.coordinate import FAREWELL_S, TICK_S
from checkpointless.agent.coordinator import FAILED, Coordinator
from checkpointless.agent.joining import Joining
from checkpointless.agent.node import NodeAgent
from checkpointless.agent.node_protocol import Alive, Command, End, NodeMessage
from checkpointless.agent.port import CoordinatorPort
from checkpointless.agent.status import Watch


class Link(abc.ABC):
    """Between the agent of this node and the coordinator; messages wait until they are delivered.

    Attributes:
        commands: for the agent.
        coordinator: of the job, where it lives in this loop.
    """

    def __init__(self) -> None:
        self.commands: deque[Command] = deque()
        self.coordinator: Coordinator | None = None

    @abc.abstractmethod
    def report(self, message: NodeMessage) -> None:
        """Take what the agent tells the coordinator."""

    @abc.abstractmethod
    def deliver(self, agent: NodeAgent, now_s: float) -> None:
        """Hand over all that waits, and let time pass for the other side.

        Args:
            agent: of this node.
            now_s: on the monotonic clock.
        """

    @abc.abstractmethod
    def is_needed(self, now_s: float) -> bool:
        """Whether this process has to stay although its own agent has ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of every descriptor."""


class HostLink(Link):
    """To a coordinator in this very loop, which other nodes may reach through a port.

    Args:
        coordinator: of the job.
        port: None if there is only this node.
    """

    def __init__(self, coordinator: Coordinator, port: CoordinatorPort | None) -> None:
        super().__init__()
        self._reports: deque[NodeMessage] = deque()
        self.coordinator = self._coordinator = coordinator
        self._port = port
        self._node = coordinator.admit(0, coordinator.nodes[0].nproc, self.commands.append)
        coordinator.host = self._node
        self._until_s: float | None = None

    def report(self, message: NodeMessage) -> None:
        """Take what the agent tells the coordinator."""
        self._reports.append(message)

    def deliver(self, agent: NodeAgent, now_s: float) -> None:
        """Hand over all that waits, and what comes of it, until nothing does."""
        self._exchange(agent)
        if self._port is not None:
            self._port.tick(now_s)
        self._coordinator.tick(now_s)
        self._exchange(agent)

    def is_needed(self, now_s: float) -> bool:
        """While an agent is connected, for a while."""
        if self._until_s is None:
            self._until_s = now_s + FAREWELL_S
        return self._port is not None and self._port.has_guests() and now_s < self._until_s

    def close(self) -> None:
        """Close the port and the store."""
        if self._port is not None:
            self._port.close()
        self._coordinator.close()

    def _exchange(self, agent: NodeAgent) -> None:
        while self._reports or self.commands:
            while self._reports:
                self._coordinator.hear(self._node, self._reports.popleft())
            while self.commands:
                agent.obey(self.commands.popleft())


class GuestLink(Link):
    """To a coordinator in another process.

    Args:
        joining: the connection, made and proved.
        silence_s: after how many seconds without a word the coordinator is lost.
    """

    def __init__(self, joining: Joining, selector: selectors.BaseSelector, silence_s: float) -> None:
        super().__init__()
        self._where = joining.where
        self._silence_s = silence_s
        self._lost = ""
        self._heard = 0
        self._heard_at_s = time.monotonic()
        self._next_alive_s = 0.0
        self._channel = joining.open(selector, self.commands.append, self._on_close)

    def report(self, message: NodeMessage) -> None:
        """Take what the agent tells the coordinator."""
        self._channel.send(message)

    def deliver(self, agent: NodeAgent, now_s: float) -> None:
        """Hand over what has come; end the job here if nothing more can come."""
        if now_s >= self._next_alive_s:
            self._next_alive_s = now_s + self._silence_s / 5
            self._channel.send(Alive())
        if self._channel.bytes_heard != self._heard:
            self._heard, self._heard_at_s = self._channel.bytes_heard, now_s
        elif now_s >= self._heard_at_s + self._silence_s and not self._lost:
            self._channel.close()
            self._lost = f"no word from it for {self._silence_s:g} s"
        try:
            while self.commands:
                agent.obey(self.commands.popleft())
        except ValueError as error:
            self._lost = f"it does not keep to the protocol: {error}"
        if self._lost:  # at once: the job may go on elsewhere, with these ranks
            agent.end(End(FAILED, [f"the coordinator at {self._where} was lost: {self._lost}"]), grace_s=0.0)

    def is_needed(self, now_s: float) -> bool:
        """Never: the coordinator hears of the end by the connection's."""
        return False

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _on_close(self, reason: str) -> None:
        self._lost = reason


def serve(
    agent: NodeAgent,
    link: Link,
    selector: selectors.BaseSelector,
    signals: list[int],
    watch: Watch | None = None,
) -> End:
    """Run a node's part of a job until every rank's process has ended.

    Args:
        agent: of this node.
        link: to the coordinator.
        selector: which both register their descriptors with; the data of each is called when it is ready.
        signals: the signals that this process got; a handler appends to it.
        watch: looks at the job in every turn.

    Returns:
        How the job ended.
    """
    try:
        while agent.outcome is None or agent.alive() or link.is_needed(time.monotonic()):
            for key, _ in selector.select(TICK_S):
                key.data()
            now_s = time.monotonic()
            while signals:
                agent.interrupted(signals.pop(0))
            agent.tick(now_s)
            link.deliver(agent, now_s)
            if watch is not None:
                watch.look(agent, link.coordinator, now_s)
        return agent.outcome
    finally:
        agent.close()
        link.close()
        selector.close()
