"""Links the agent of a node to the coordinator of its job, which runs in the same loop or elsewhere."""

from __future__ import annotations

import abc
import logging
import queue
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable

from checkpointless.launcher.agent.joining import JoinError, Joining, RefusedError
from checkpointless.launcher.agent.node import NodeAgent
from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.hosting import FAREWELL_S
from checkpointless.launcher.coordinator.job import FAILED
from checkpointless.launcher.coordinator.listener import CoordinatorPort
from checkpointless.launcher.protocol.channel import LOOPBACK, Channel
from checkpointless.launcher.protocol.node_messages import (
    Alive,
    Command,
    End,
    JobOver,
    Joined,
    NodeMessage,
    RankInexact,
    Searching,
    Trouble,
)

logger = logging.getLogger(__name__)

_KEPT = (Trouble, JobOver, RankInexact)  # while there is no coordinator; the agent tells the rest with its standing


class Link(abc.ABC):
    """Connects the agent of this node with the coordinator; messages wait until they are delivered.

    Attributes:
        commands: commands that wait for the agent.
        coordinator: the job's coordinator if it runs in this loop, else None.
        address: numeric address at which the other nodes reach this one.
    """

    def __init__(self, address: str) -> None:
        self.commands: deque[Command] = deque()
        self.address = address
        self.coordinator: Coordinator | None = None

    @abc.abstractmethod
    def report(self, message: NodeMessage) -> None:
        """Take what the agent tells the coordinator."""

    @abc.abstractmethod
    def deliver(self, agent: NodeAgent, now_s: float) -> None:
        """Deliver every message that waits, and let time pass for the other side.

        Args:
            agent: the agent of this node.
            now_s: the current time on the monotonic clock.
        """

    @abc.abstractmethod
    def is_needed(self, now_s: float) -> bool:
        """Return whether this process must stay although its own agent has ended."""

    @abc.abstractmethod
    def cut(self) -> None:
        """Lose the coordinator, as an injected fault."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close every descriptor."""


class HostLink(Link):
    """A link to a coordinator in the same loop, which other nodes may reach through a port.

    Args:
        coordinator: the job's coordinator.
        port: port for the other nodes; None if there is only this node.
    """

    def __init__(self, coordinator: Coordinator, port: CoordinatorPort | None) -> None:
        super().__init__(LOOPBACK if port is None else port.address)
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
        """Deliver every message that waits, and those that follow from it, until none is left."""
        self._exchange(agent)
        if self._port is not None:
            self._port.tick(now_s)
        self._coordinator.tick(now_s)
        self._exchange(agent)

    def is_needed(self, now_s: float) -> bool:
        """Return True while an agent is connected, but only for a limited time."""
        if self._until_s is None:
            self._until_s = now_s + FAREWELL_S
        return self._port is not None and self._port.has_guests() and now_s < self._until_s

    def cut(self) -> None:
        """End the job: there is no connection that could be lost."""
        self._coordinator.end(FAILED, "fault store: this agent coordinates, so it has no connection to be cut")

    def close(self) -> None:
        """Close the port."""
        if self._port is not None:
            self._port.close()

    def _exchange(self, agent: NodeAgent) -> None:
        while self._reports or self.commands:
            while self._reports:
                self._coordinator.hear(self._node, self._reports.popleft())
            while self.commands:
                agent.obey(self.commands.popleft())


class GuestLink(Link):
    """A link to a coordinator in another process.

    If the coordinator is lost, the ranks continue to train while this looks for it again.

    Args:
        join: called with a node number and a function; connects to the coordinator as that node and proves itself.
            It may take long, and polls the function, which returns whether to give up.
        number: this node's number, or :data:`~checkpointless.launcher.protocol.handshake.SPARE`.
        nproc: how many ranks this node runs.
        selector: selector of the loop.
        silence_s: after how many seconds of silence the coordinator counts as lost.
        say: called with each line for the terminal.
        stopped: returns whether to give up the first attempt to join.
        clock: clock of the times given to :meth:`deliver`; it should stand still while this process does not run.

    Raises:
        JoinError: the coordinator cannot be reached, or has no place for this node.
    """

    def __init__(
        self,
        join: Callable[[int, Callable[[], bool]], Joining],
        number: int,
        *,
        nproc: int,
        selector: selectors.BaseSelector,
        silence_s: float,
        say: Callable[[str], None],
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        joining = join(number, stopped)
        super().__init__(joining.own_address)
        self._join = join
        self._number = number
        self._nproc = nproc
        self._selector = selector
        self._silence_s = silence_s
        self._say = say
        self._lost = ""
        self._search: _Search | None = None
        self._kept: deque[NodeMessage] = deque(maxlen=1024)
        self._heard = 0
        self._heard_at_s = self._next_alive_s = 0.0
        self._channel = self._open(joining)

    def report(self, message: NodeMessage) -> None:
        """Take what the agent tells the coordinator."""
        if self._search is None:
            self._channel.send(message)
        elif isinstance(message, _KEPT):
            self._kept.append(message)

    def deliver(self, agent: NodeAgent, now_s: float) -> None:
        """Deliver what has come. If the coordinator is lost, look for it; if it stays lost, end the job here."""
        if self._search is not None:
            self._look(self._search, agent)
            return
        if now_s >= self._next_alive_s:
            self._next_alive_s = now_s + self._silence_s / 5
            self._channel.send(Alive())
        if self._channel.bytes_heard != self._heard:
            self._heard, self._heard_at_s = self._channel.bytes_heard, now_s
        elif now_s >= self._heard_at_s + self._silence_s and not self._lost:
            self._channel.send(Searching())  # if it was only paused, it reads this before the end
            self._channel.close()
            self._lost = f"no word from it for {self._silence_s:g} s"
        try:
            while self.commands:
                agent.obey(self.commands.popleft())
        except ValueError as error:
            agent.end(End(FAILED, [f"the coordinator at {self._where} does not keep to the protocol: {error}"]))
        if self._lost and agent.outcome is None:
            self._say(f"the coordinator at {self._where} was lost ({self._lost}): training goes on without it")
            if agent.ranks:  # a spare got its number with its ranks
                self._number = min(agent.ranks) // self._nproc
            self._search = _Search(self._join, self._number)

    def is_needed(self, now_s: float) -> bool:
        """Return False: the coordinator learns of the end when the connection closes."""
        return False

    def cut(self) -> None:
        """Close the connection; the coordinator is looked for again in the next turn."""
        if self._search is None:
            self._channel.close()
            self._lost = "cut on purpose"

    def close(self) -> None:
        """Close the connection."""
        if self._search is not None:
            self._search.stop()
        self._channel.close()

    def _look(self, search: _Search, agent: NodeAgent) -> None:
        if agent.outcome is not None:  # its ranks are ending, so nobody should count on them
            search.stop()
            return
        found = search.result()
        if isinstance(found, JoinError) and agent.has_ended_well:
            agent.end(End(0, []))
        elif isinstance(found, JoinError):
            words = [f"the coordinator at {self._where} was lost: {self._lost}", str(found)]
            if isinstance(found, RefusedError):  # at once: others may have taken their place
                agent.end(End(FAILED, words), grace_s=0.0)
            else:
                agent.end(End(FAILED, words))
        elif found is not None:
            self._say(f"the coordinator at {self._where} is back")
            self._search, self._lost = None, ""
            self.address = found.own_address
            self._channel = self._open(found)
            while self._kept:  # first, so that what led to the standing is known when it arrives
                self._channel.send(self._kept.popleft())
            if agent.is_discarding:
                pass  # it joins when its ranks have ended
            elif agent.ranks:
                self._channel.send(agent.standing())
            elif agent.joined:
                self._channel.send(Joined())

    def _open(self, joining: Joining) -> Channel:
        self._where = joining.where
        self._heard, self._heard_at_s, self._next_alive_s = 0, self._clock(), 0.0
        return joining.open(self._selector, self.commands.append, self._on_close)

    def _on_close(self, reason: str) -> None:
        self._lost = reason


class _Search:
    """Joins in a separate thread, so that the loop continues meanwhile."""

    def __init__(self, join: Callable[[int, Callable[[], bool]], Joining], number: int) -> None:
        self._stopped = threading.Event()
        self._found: queue.SimpleQueue[Joining | JoinError] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(join, number), name="checkpointless-join", daemon=True).start()

    def result(self) -> Joining | JoinError | None:
        """Return the outcome of the search, or None while it continues."""
        try:
            return self._found.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> None:
        """Give up the search."""
        self._stopped.set()

    def _run(self, join: Callable[[int, Callable[[], bool]], Joining], number: int) -> None:
        try:
            self._found.put(join(number, self._stopped.is_set))
        except JoinError as error:
            self._found.put(error)
        except Exception as error:
            logger.exception("the coordinator cannot be looked for")
            self._found.put(JoinError(f"it cannot be looked for: {type(error).__name__}: {error}"))
