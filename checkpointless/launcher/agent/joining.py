"""Joins an agent to a job that is coordinated elsewhere: it connects, proves the token and is admitted."""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from checkpointless.launcher.protocol.channel import Channel
from checkpointless.launcher.protocol.handshake import (
    BEFORE_WELCOME,
    Challenge,
    Refused,
    Welcome,
    check_version,
    is_welcome,
    prove,
)
from checkpointless.launcher.protocol.messages import LineBuffer, ProtocolError, encode
from checkpointless.launcher.protocol.node_messages import FROM_COORDINATOR
from checkpointless.system.awake_clock import AwakeClock

RETRY_S = 0.5
ANSWER_TIMEOUT_S = 10.0
_PAUSE_S = 15.0  # no attempt takes this long: a longer pause means that this process was stopped
REFUSED_FOR_S = 2.0  # a refusal that lasts this long is final


class JoinError(RuntimeError):
    """This agent cannot take part in the job; the message says why."""


class RefusedError(JoinError):
    """The coordinator has no place for this node."""


class Joining:
    """A connection to the coordinator on which both sides have proved that they know the token.

    Args:
        address: address of the coordinator.
        port: port of the coordinator.
        token: the job's token.
        node: this node's number, or :data:`~checkpointless.launcher.protocol.handshake.SPARE`.
        nproc: how many ranks this node runs.
        timeout_s: how many seconds to try to reach the coordinator.
        stopped: polled while this waits; the attempt ends when it returns True.
        refused_for_s: how many seconds to keep trying while the coordinator refuses this node: it may not have
            noticed yet that this node's predecessor was lost.

    Raises:
        JoinError: the coordinator was not reached in time, does not know the token, or has no place for this node;
            or ``stopped`` returned True.

    Attributes:
        where: address and port of the coordinator, for messages.
        own_address: the numeric address of this node, as the coordinator sees it.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        token: str,
        node: int,
        nproc: int,
        timeout_s: float,
        stopped: Callable[[], bool],
        refused_for_s: float = REFUSED_FOR_S,
    ) -> None:
        self.where = f"{address}:{port}"
        self._stopped = stopped
        clock = AwakeClock(most_s=_PAUSE_S)
        deadline_s = clock() + timeout_s
        refused_since_s: float | None = None
        while True:
            try:
                self._connection = self._connect(address, port)
                self._prove(token, node, nproc)
                self.own_address: str = self._connection.getsockname()[0]
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
            self._pause(RETRY_S)

    def open(
        self,
        selector: selectors.BaseSelector,
        on_message: Callable[[Any], None],
        on_close: Callable[[str], None],
    ) -> Channel:
        """Return the connection as a channel in the loop of ``selector``."""
        return Channel(self._connection, selector, hears=FROM_COORDINATOR, on_message=on_message, on_close=on_close)

    def _connect(self, address: str, port: int) -> socket.socket:
        self._lines = LineBuffer()
        return socket.create_connection((address, port), timeout=2.0)

    def _prove(self, token: str, node: int, nproc: int) -> None:
        try:
            challenge = self._hear()
            if not isinstance(challenge, Challenge):
                raise ProtocolError(f"it began with {challenge.type!r}")
            try:
                check_version(challenge.version)
            except ValueError as error:
                raise JoinError(f"the coordinator at {self.where} cannot be joined: {error}") from error
            proof = prove(token, challenge, node, nproc)
            self._connection.sendall(encode(proof))
            try:
                answer = self._hear()
            except ConnectionError as error:
                raise JoinError(f"the coordinator at {self.where} does not accept this job's token") from error
            if isinstance(answer, Refused):
                raise RefusedError(f"the coordinator at {self.where} has no place for this node: {answer.reason}")
            if not isinstance(answer, Welcome) or not is_welcome(token, challenge, proof, answer):
                raise JoinError(f"what listens at {self.where} does not know this job's token")
        except BaseException:
            self._connection.close()
            raise

    def _hear(self) -> Any:
        """Receive one message, byte by byte, so that no part of the next one is swallowed."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._pause(0.0)
            if not select.select([self._connection], [], [], 0.1)[0]:
                continue
            byte = self._connection.recv(1)
            if not byte:
                raise ConnectionResetError("it closed the connection")
            lines = self._lines.feed(byte)
            if lines:
                return BEFORE_WELCOME.decode(lines[0])
        raise TimeoutError(f"it said nothing for {ANSWER_TIMEOUT_S:g} s")

    def _pause(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while True:
            if self._stopped():
                raise JoinError("stopped while waiting for the coordinator")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.1))
