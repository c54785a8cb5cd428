"""Start a coordinator in node 0's agent or in a separate process (``checkpointless coordinator``)."""

from __future__ import annotations

import functools
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from checkpointless.launcher.coordinator.coordinator import Coordinator
from checkpointless.launcher.coordinator.job import FAILED, Node
from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.launcher.protocol.causes import signal_name
from checkpointless.launcher.protocol.channel import (
    BEFORE_PROOF,
    OPERATOR,
    Challenge,
    Channel,
    Proof,
    Refused,
    check_version,
    resolve,
)
from checkpointless.launcher.protocol.messages import FROM_NODE, FROM_OPERATOR, Alive, MoveWanted
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.system.awake_clock import AwakeClock

logger = logging.getLogger(__name__)

_PROOF_TIMEOUT_S = 5.0
_MAX_UNPROVED = 128  # connections that have proved nothing yet; the oldest makes room for a new one
_ACCEPTS_PER_TURN = 16
TICK_S = 0.05
FAREWELL_S = 10.0  # for the agents to hear that the job is over


@dataclass
class _Guest:
    """A connection to the port."""

    challenge: Challenge
    heard_at_s: float  # when ``heard`` bytes had come; until the proof, when the connection was made
    channel: Channel = field(init=False)
    node: Node | None = None  # the node at the other end, once it has proved that it knows the token
    has_asked: bool = False  # whether it is an operator's, who waits for what it has asked for
    heard: int = 0
    last_word_s: float = field(default_factory=time.monotonic)  # on the monotonic clock


class CoordinatorPort:
    """A coordinator that listens for agents in the loop of ``selector`` and measures limits with ``clock``.

    Raises:
        OSError: the address cannot be resolved or listened on.
    """

    def __init__(
        self,
        config: JobConfig,
        selector: selectors.BaseSelector,
        events: EventLog,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        name, port = config.endpoint
        self.address = address = resolve(name)
        if address.startswith("127.") and not name.startswith(("127.", "localhost")):
            say(f"{name} is {address} here, which no other node can reach: use an address of this node's own")
        self.coordinator = Coordinator(config, events=events, say=say, clock=clock)
        self._token, self._silence_s = config.token, config.node_timeout_s
        self._clock = clock
        self._selector = selector
        self._next_alive_s = 0.0
        self._guests: list[_Guest] = []
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(where[:2], family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tick(self, now_s: float) -> None:
        """Send signs of life, and drop the connections that send none."""
        if now_s >= self._next_alive_s:
            self._next_alive_s = now_s + self._silence_s / 5
            for guest in self._guests:
                if guest.node is not None:
                    guest.channel.send(Alive())
        for guest in list(self._guests):
            channel = guest.channel
            if guest.has_asked:
                continue  # its connection says whether it is still there
            if guest.node is None:
                if now_s >= guest.heard_at_s + _PROOF_TIMEOUT_S:
                    self._show_out(guest)
            elif channel.bytes_heard != guest.heard:
                guest.heard, guest.heard_at_s, guest.last_word_s = channel.bytes_heard, now_s, time.monotonic()
            elif now_s >= guest.heard_at_s + self._silence_s:
                self._show_out(guest)
                why = f"no word from it for {self._silence_s:g} s"
                self.coordinator.membership.lose(guest.node, why, guest.last_word_s)

    def has_guests(self) -> bool:
        """Return whether an agent is still connected."""
        return any(guest.node is not None for guest in self._guests)

    def close(self) -> None:
        """Stop listening, and close every connection."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for guest in list(self._guests):
            self._show_out(guest)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody waits, or the client has gone
                return
            unproved = [guest for guest in self._guests if guest.node is None and not guest.has_asked]
            if len(unproved) >= _MAX_UNPROVED:
                self._show_out(unproved[0])
            guest = _Guest(Challenge(), self._clock())
            guest.channel = Channel(
                connection,
                self._selector,
                hears=BEFORE_PROOF,
                on_message=functools.partial(self._hear, guest),
                on_close=functools.partial(self._lost, guest),
            )
            self._guests.append(guest)
            guest.channel.send(guest.challenge)

    def _hear(self, guest: _Guest, message: Any) -> None:
        if guest.node is not None:
            self.coordinator.hear(guest.node, message)
        elif isinstance(message, MoveWanted) and not guest.has_asked:
            guest.has_asked = True
            rank, config = message.rank, self.coordinator.job.config
            node = message.node if rank < 0 else rank // config.nproc_per_node
            self.coordinator.moves.ask(node, message.reason, guest.channel.send)
        elif isinstance(message, Proof):
            self._on_proof(guest, guest.channel, message)

    def _on_proof(self, guest: _Guest, channel: Channel, proof: Proof) -> None:
        if not guest.challenge.is_proved(self._token, proof):
            logger.warning("refused an agent that does not know the job's token")
            self._show_out(guest)
            return
        try:
            check_version(proof.version)
            if proof.node == OPERATOR:
                channel.hears = FROM_OPERATOR
                channel.send(guest.challenge.welcome(self._token, proof))
                return
            guest.node = self.coordinator.membership.admit(proof.node, proof.nproc, channel.send)
        except ValueError as error:
            channel.send(Refused(str(error)))
            self._show_out(guest)
            return
        guest.heard_at_s = self._clock()
        channel.hears = FROM_NODE
        channel.send(guest.challenge.welcome(self._token, proof))

    def _lost(self, guest: _Guest, reason: str) -> None:
        self._guests.remove(guest)
        if guest.node is not None:
            self.coordinator.membership.lose(guest.node, reason)

    def _show_out(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        guest.channel.close()


def coordinate(
    config: JobConfig,
    events: EventLog,
    say: Callable[[str], None],
    signals: list[int],
    look: Callable[[Coordinator, float], None] | None = None,
) -> int:
    """Coordinate a job from this process until it is over; return its exit code.

    Args:
        signals: the signals that this process has received, appended by a handler. The first one ends the job.
        look: looks at the job in every turn of the loop; called with the monotonic time in seconds.

    Raises:
        OSError: the address cannot be resolved or listened on.
    """
    selector = selectors.DefaultSelector()
    clock = AwakeClock()
    door = CoordinatorPort(config, selector, events, say, clock)
    coordinator, job = door.coordinator, door.coordinator.job
    say(f"coordinating {config.nnodes} nodes of {config.nproc_per_node} ranks at {config.endpoint[0]}:{door.port}")
    until_s = float("inf")
    try:
        while job.outcome is None or (door.has_guests() and clock() < until_s):
            for key, _ in selector.select(TICK_S):
                key.data()
            now_s = clock()
            while signals:
                job.end(FAILED, f"stopped by {signal_name(signals.pop(0))}")
            door.tick(now_s)
            coordinator.tick(now_s)
            if look is not None:
                look(coordinator, time.monotonic())
            if job.outcome is not None and until_s == float("inf"):
                until_s = now_s + FAREWELL_S
        for line in job.outcome.last_words:
            say(line)
        return job.outcome.code
    finally:
        door.close()
        selector.close()
