"""Links the agent of a node to the coordinator of its job, which runs in the same loop or elsewhere."""

from __future__ import annotations

import errno
import logging
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.node import NodeAgent
from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.hosting import FAREWELL_S, CoordinatorPort
from checkpointless.launcher.coordinator.job import FAILED
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.channel import (
    BEFORE_WELCOME,
    LOOPBACK,
    OPERATOR,
    SPARE,
    Challenge,
    Channel,
    Refused,
    Welcome,
    check_version,
)
from checkpointless.launcher.protocol.messages import Command, LineBuffer, NodeMessage, ProtocolError
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.observability.telemetry.scribe import in_thread
from checkpointless.system.awake_clock import AwakeClock
from checkpointless.system.signals import ENDING

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_ANSWER_TIMEOUT_S = 10.0
_PAUSE_S = 15.0  # no attempt takes this long: a longer pause means that this process was stopped
_NEWS_BYTES = 4096
_REACH_S = 10.0  # for a command to reach the coordinator
_REFUSED_FOR_S = 2.0  # a refusal that lasts this long is final

#: What waits while there is no coordinator; the agent tells the rest with its standing.
_KEPT = (messages.FaultReport, messages.GiveUp, messages.Inexact)


class _LocalLink:
    """A link to a coordinator in the same loop, which other nodes may reach through a port (None: no others)."""

    def __init__(self, coordinator: Coordinator, port: CoordinatorPort | None) -> None:
        self.address = LOOPBACK if port is None else port.address
        self.coordinator = coordinator
        self._reports: deque[NodeMessage] = deque()
        self._commands: deque[Command] = deque()
        self._port = port
        self._node = coordinator.membership.admit(0, coordinator.nodes[0].nproc, self._commands.append)
        coordinator.job.host = self._node
        self._until_s: float | None = None

    def report(self, message: NodeMessage) -> None:
        self._reports.append(message)

    def deliver(self, agent: NodeAgent, now_s: float) -> None:
        """Deliver every message that waits, and those that follow from it, until none is left."""
        self._exchange(agent)
        if self._port is not None:
            self._port.tick(now_s)
        self.coordinator.tick(now_s)
        self._exchange(agent)

    def is_needed(self, now_s: float) -> bool:
        """Return True while an agent is connected, but only for a limited time."""
        if self._until_s is None:
            self._until_s = now_s + FAREWELL_S
        return self._port is not None and self._port.has_guests() and now_s < self._until_s

    def cut(self) -> None:
        """End the job: there is no connection that could be lost."""
        self.coordinator.job.end(FAILED, "fault store: this agent coordinates, so it has no connection to be cut")

    def close(self) -> None:
        if self._port is not None:
            self._port.close()

    def _exchange(self, agent: NodeAgent) -> None:
        while self._reports or self._commands:
            while self._reports:
                self.coordinator.hear(self._node, self._reports.popleft())
            while self._commands:
                agent.obey(self._commands.popleft())


class _RemoteLink:
    """A link to a coordinator in another process; if it is lost, ranks train on while a thread looks for it."""

    def __init__(
        self,
        config: LaunchConfig,
        selector: selectors.BaseSelector,
        signals: Sequence[int],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._selector, self._say, self._clock = config, selector, say, clock
        self._number = config.node_rank if config.node_rank < config.nnodes else SPARE
        self._silence_s = config.node_timeout_s
        joining = _Joining(
            config, self._number, config.join_timeout_s, lambda: any(number in ENDING for number in signals)
        )
        self.address = joining.own_address
        self.coordinator = None  # it is elsewhere
        self._commands: deque[Command] = deque()
        self._lost = ""
        self._search: Future[_Joining] | None = None
        self._stopped = threading.Event()  # gives a search up
        self._kept: deque[NodeMessage] = deque(maxlen=1024)
        self._heard = 0
        self._heard_at_s = self._next_alive_s = 0.0
        self._channel = self._open(joining)

    def report(self, message: NodeMessage) -> None:
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
            self._channel.send(messages.Alive())
        if self._channel.bytes_heard != self._heard:
            self._heard, self._heard_at_s = self._channel.bytes_heard, now_s
        elif now_s >= self._heard_at_s + self._silence_s and not self._lost:
            self._channel.send(messages.Searching())  # if it was only paused, it reads this before the end
            self._channel.close()
            self._lost = f"no word from it for {self._silence_s:g} s"
        try:
            while self._commands:
                agent.obey(self._commands.popleft())
        except ValueError as error:
            words = f"the coordinator at {self._where} does not keep to the protocol: {error}"
            agent.end(messages.End(FAILED, [words]))
        if self._lost and agent.job.outcome is None:
            self._say(f"the coordinator at {self._where} was lost ({self._lost}): training goes on without it")
            if agent.has_moved and agent.alive():
                agent.obey(messages.Discard(moved=True))  # ranks offer a state that no later coordinator knows of
            if agent.takes_part:  # a spare got its number with its ranks
                self._number = min(agent.ranks) // self._config.nproc_per_node
            elif agent.has_moved:
                self._number = SPARE
            limits_s = self._config.regroup_timeout_s, _REFUSED_FOR_S + self._config.node_timeout_s
            join = partial(_Joining, self._config, self._number, limits_s[0], self._stopped.is_set, limits_s[1])
            self._search = in_thread(join, "join")

    def is_needed(self, now_s: float) -> bool:
        """Return False: the coordinator learns of the end when the connection closes."""
        return False

    def cut(self) -> None:
        """Close the connection; the coordinator is looked for again in the next turn."""
        if self._search is None:
            self._channel.close()
            self._lost = "cut on purpose"

    def close(self) -> None:
        self._stopped.set()
        self._channel.close()

    def _look(self, search: Future[_Joining], agent: NodeAgent) -> None:
        if agent.job.outcome is not None:  # its ranks are ending, so nobody should count on them
            self._stopped.set()
        elif search.done() and (error := search.exception()) is not None:
            self._end_without(error, agent)
        elif search.done():
            found = search.result()
            self._say(f"the coordinator at {self._where} is back")
            self._search, self._lost = None, ""
            self.address = found.own_address
            self._channel = self._open(found)
            while self._kept:  # first, so that what led to the standing is known when it arrives
                self._channel.send(self._kept.popleft())
            if agent.processes.is_discarding:
                pass  # it joins when its ranks have ended
            elif agent.ranks:
                self._channel.send(agent.standing())
            elif agent.processes.can_start:
                self._channel.send(messages.Joined())

    def _end_without(self, error: BaseException, agent: NodeAgent) -> None:
        """End the job on this node, since the coordinator was not found."""
        if not isinstance(error, JoinError):
            logger.error("the coordinator cannot be looked for", exc_info=error)
            error = JoinError(f"it cannot be looked for: {type(error).__name__}: {error}")
        words = [f"the coordinator at {self._where} was lost: {self._lost}", str(error)]
        if agent.has_ended_well:
            agent.end(messages.End(0, []))
        elif isinstance(error, _RefusedError):  # at once: others may have taken their place
            agent.end(messages.End(FAILED, words), grace_s=0.0)
        else:
            agent.end(messages.End(FAILED, words))

    def _open(self, joining: _Joining) -> Channel:
        self._where = joining.where
        self._heard, self._heard_at_s, self._next_alive_s = 0, self._clock(), 0.0
        return joining.open(self._selector, self._commands.append, self._on_close)

    def _on_close(self, reason: str) -> None:
        self._lost = reason


class JoinError(RuntimeError):
    """This agent cannot take part in the job; the message says why."""


class _RefusedError(JoinError):
    """The coordinator has no place for this node."""


class _Joining:
    """A connection to the coordinator on which both sides have proved that they know the token; else ``JoinError``.

    It keeps trying for ``refused_for_s`` while the coordinator refuses this node: it may not have noticed yet that
    this node's predecessor was lost.
    """

    def __init__(
        self,
        config: JobConfig,
        node: int,
        timeout_s: float,
        stopped: Callable[[], bool],
        refused_for_s: float = _REFUSED_FOR_S,
    ) -> None:
        self.where = "{}:{}".format(*config.endpoint)
        self._stopped = stopped
        clock = AwakeClock(most_s=_PAUSE_S)
        deadline_s = clock() + timeout_s
        refused_since_s: float | None = None
        while True:
            try:
                self._lines = LineBuffer()
                self.connection = socket.create_connection(config.endpoint, timeout=2.0)
                self._prove(config.token, node, config.nproc_per_node)
                self.own_address: str = self.connection.getsockname()[0]
                return
            except JoinError:
                refused_since_s = refused_since_s or clock()
                if clock() >= refused_since_s + refused_for_s or self._stopped():
                    raise
            except (OSError, ProtocolError) as error:  # the coordinator may not be up yet, or is just ending
                if clock() >= deadline_s:
                    raise JoinError(
                        f"the coordinator at {self.where} was not reached within {timeout_s:g} s: {error}"
                    ) from error
                refused_since_s = None
            self._pause(_RETRY_S)

    def open(
        self, selector: selectors.BaseSelector, on_message: Callable[[Any], None], on_close: Callable[[str], None]
    ) -> Channel:
        hears = messages.FROM_COORDINATOR
        return Channel(self.connection, selector, hears=hears, on_message=on_message, on_close=on_close)

    def _prove(self, token: str, node: int, nproc: int) -> None:
        try:
            challenge = self._hear()
            if not isinstance(challenge, Challenge):
                raise ProtocolError(f"it began with {challenge.type!r}")
            try:
                check_version(challenge.version)
            except ValueError as error:
                raise JoinError(f"the coordinator at {self.where} cannot be joined: {error}") from error
            proof = challenge.prove(token, node, nproc)
            self.connection.sendall(messages.encode(proof))
            try:
                answer = self._hear()
            except ConnectionError as error:
                raise JoinError(f"the coordinator at {self.where} does not accept this job's token") from error
            if isinstance(answer, Refused):
                raise _RefusedError(f"the coordinator at {self.where} has no place for this node: {answer.reason}")
            if not isinstance(answer, Welcome) or not challenge.is_welcome(token, proof, answer):
                raise JoinError(f"what listens at {self.where} does not know this job's token")
        except BaseException:
            self.connection.close()
            raise

    def _hear(self) -> Any:
        """Receive one message, byte by byte, so that no part of the next one is swallowed."""
        deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._pause(0.0)
            if not select.select([self.connection], [], [], 0.1)[0]:
                continue
            byte = self.connection.recv(1)
            if not byte:
                raise ConnectionResetError("it closed the connection")
            lines = self._lines.feed(byte)
            if lines:
                return BEFORE_WELCOME.decode(lines[0])
        raise TimeoutError(f"it said nothing for {_ANSWER_TIMEOUT_S:g} s")

    def _pause(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while True:
            if self._stopped():
                raise JoinError("stopped while waiting for the coordinator")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.1))


def move_node(config: JobConfig, node: int, rank: int, say: Callable[[str], None], timeout_s: float) -> bool:
    """Ask a job to move a node's ranks (-1: the node of ``rank``) to a spare, and return whether they have moved.

    ``JoinError`` says that there is no such coordinator, ``TimeoutError`` that the move still goes on.
    """
    asked = _Joining(config, OPERATOR, _REACH_S, lambda: False)
    deadline_s = time.monotonic() + timeout_s
    with asked.connection as connection:
        connection.sendall(messages.encode(messages.MoveWanted("checkpointless move", node, rank)))
        lines = LineBuffer()
        while (left_s := deadline_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            data = connection.recv(_NEWS_BYTES)
            if not data:
                raise JoinError(f"the coordinator at {asked.where} has ended")
            for line in lines.feed(data):
                news = messages.FROM_COORDINATOR.decode(line)
                say(news.line)
                if news.is_over:
                    return bool(news.is_moved)
    raise TimeoutError


#: Connects the agent of this node with the coordinator; messages wait until they are delivered.
Link: TypeAlias = _LocalLink | _RemoteLink


def link_to_coordinator(
    config: LaunchConfig,
    selector: selectors.BaseSelector,
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> Link:
    """Return the link to the coordinator, which runs here on node 0 unless there is one elsewhere."""
    if config.is_alone:
        return _LocalLink(Coordinator(config, events=events, say=say, clock=clock), None)
    if config.node_rank == 0:
        try:
            door = CoordinatorPort(config, selector, events, say, clock)
            return _LocalLink(door.coordinator, door)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                raise
    say("node {}: joining the job at {}:{}".format(config.node_rank, *config.endpoint))
    return _RemoteLink(config, selector, signals, say, clock)
