"""A connection for messages in an event loop that must never block: lines of JSON, bounded in both directions.

At its beginning, agent and coordinator prove that they belong to one job: both know its token, and neither sends
it. Each side answers a challenge with an HMAC-SHA256 (RFC 2104) over both sides' random nonces, the sender's role
and what the sender claims, so that a proof cannot be replayed, reflected, or used for another claim. What follows
is not encrypted: the network between the nodes is trusted as far as the network of their collectives.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import logging
import secrets
import selectors
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from checkpointless.launcher.protocol.causes import Int
from checkpointless.launcher.protocol.messages import LineBuffer, Message, Vocabulary, encode

logger = logging.getLogger(__name__)

_PROTOCOL_VERSION = 11
MIN_TOKEN_CHARACTERS = 16
OPERATOR = -2  # in the place of a node number: a command of the command line, which is no node
SPARE = -1  # the node number of an agent that waits until it is needed


_new_nonce = functools.partial(secrets.token_hex, 32)


class Challenge(Message, frozen=True, tag="challenge"):
    """The coordinator's first message on every connection."""

    nonce: str = msgspec.field(default_factory=_new_nonce)
    version: Int = _PROTOCOL_VERSION

    def prove(self, token: str, node: int, nproc: int) -> Proof:
        """Return an agent's answer."""
        nonce = _new_nonce()
        return Proof(node, nproc, nonce, _mac(token, "agent", self.nonce, nonce, str(node), str(nproc)))

    def is_proved(self, token: str, proof: Proof) -> bool:
        """Return whether ``proof`` answers this, and its sender knows the token."""
        mac = _mac(token, "agent", self.nonce, proof.nonce, str(proof.node), str(proof.nproc))
        return hmac.compare_digest(mac.encode(), proof.mac.encode())

    def welcome(self, token: str, proof: Proof) -> Welcome:
        """Return the coordinator's proof that it knows the token."""
        return Welcome(_mac(token, "coordinator", self.nonce, proof.nonce))

    def is_welcome(self, token: str, proof: Proof, answer: Welcome) -> bool:
        """Return whether the sender of ``answer`` knows the token."""
        return hmac.compare_digest(self.welcome(token, proof).mac.encode(), answer.mac.encode())


class Proof(Message, frozen=True, tag="proof"):
    """The agent's answer to the challenge; ``node`` is :data:`SPARE` if it takes whichever number is free, and
    :data:`OPERATOR` if it is no agent.
    """

    node: Int
    nproc: Int
    nonce: str
    mac: str
    version: Int = _PROTOCOL_VERSION


class Welcome(Message, frozen=True, tag="welcome"):
    """The coordinator accepts the agent's proof and proves that it knows the token, too."""

    mac: str


class Refused(Message, frozen=True, tag="refused"):
    """The coordinator cannot use an agent that has proved itself."""

    reason: str


BEFORE_PROOF = Vocabulary("agent", Proof)
BEFORE_WELCOME = Vocabulary("coordinator", Challenge, Welcome, Refused)


def check_version(version: int) -> None:
    """Raise ``ValueError`` if the other side has the messages of another version."""
    if version != _PROTOCOL_VERSION:
        raise ValueError(
            f"it has version {version} of the protocol, and this side {_PROTOCOL_VERSION}: install the same "
            "checkpointless on all nodes"
        )


def _mac(token: str, *parts: str) -> str:
    return hmac.new(token.encode(), json.dumps(["checkpointless", *parts]).encode(), hashlib.sha256).hexdigest()


MAX_WAITING_BYTES = 64 * 1024 * 1024  # of messages that the other side has not accepted
_RECEIVE_BYTES = 256 * 1024
LOOPBACK = "127.0.0.1"


def resolve(address: str) -> str:
    """Return the numeric form of an address; a name is looked up, or ``OSError`` is raised."""
    return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])


class Channel:
    """One end of a connection between two agents.

    Args:
        connection: the connected socket; the channel owns it from now on.
        selector: the loop's selector; the loop calls the data of a key when something can be read or written.
        hears: the messages that may arrive.
        on_close: called once with the reason when the connection is over, unless :meth:`close` ended it. The call
            comes from the loop and never from inside :meth:`send`, whose caller may be in the middle of something.
    """

    def __init__(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        *,
        hears: Vocabulary,
        on_message: Callable[[Any], None],
        on_close: Callable[[str], None],
    ) -> None:
        connection.setblocking(False)
        self.hears = hears
        self.on_message = on_message
        self.on_close = on_close
        self.bytes_heard = 0
        self._connection: socket.socket | None = connection
        self._selector = selector
        self._lines = LineBuffer()
        self._waiting = bytearray()
        self._failure = ""
        selector.register(connection, selectors.EVENT_READ, self._on_event)

    def send(self, message: Message) -> None:
        """Send ``message`` now or as soon as the other side accepts it; drop it if the connection is over."""
        if self._connection is None or self._failure:
            return
        self._waiting += encode(message)
        if len(self._waiting) > MAX_WAITING_BYTES:
            self._fail(f"it has not taken {len(self._waiting)} bytes of messages")
        else:
            self._flush()

    def close(self) -> None:
        """Close the connection after an attempt to send what still waits; ``on_close`` is not called."""
        if self._connection is not None and not self._failure:
            self._flush()
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
            self._waiting.clear()

    def _fail(self, reason: str) -> None:
        """Mark the connection as over; the shutdown makes the loop call :meth:`_on_event`, which reports it."""
        self._failure = reason
        self._waiting.clear()
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("the connection was closed already")
            self._selector.modify(self._connection, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_event)

    def _on_event(self) -> None:
        if self._connection is None:  # another event has closed it in the same turn of the loop
            return
        if self._waiting:
            self._flush()
        if not self._failure:
            self._hear()
        if self._failure and self._connection is not None:
            self._drop()
            self.on_close(self._failure)

    def _flush(self) -> None:
        assert self._connection is not None
        try:
            while self._waiting:
                del self._waiting[: self._connection.send(self._waiting)]
        except BlockingIOError:
            logger.debug("%d bytes wait to be taken", len(self._waiting))
        except OSError as error:
            self._fail(str(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._waiting else 0)
        self._selector.modify(self._connection, events, self._on_event)

    def _hear(self) -> None:
        """Read once, so that a peer that never stops sending cannot hold up the loop."""
        assert self._connection is not None
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._failure = str(error)
            return
        if not data:
            self._failure = "it closed the connection"
            return
        self.bytes_heard += len(data)
        try:
            for line in self._lines.feed(data):
                if self._connection is not None:
                    self.on_message(self.hears.decode(line))
        except ValueError as error:
            self._failure = f"it does not keep to the protocol: {error}"
