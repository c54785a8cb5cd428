"""The connection of the agent to the process of a rank."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable

from checkpointless.launcher.protocol.messages import FROM_RANK, AgentMessage, LineBuffer, RankMessage, encode

logger = logging.getLogger(__name__)


class RankLink:
    """The agent's end of a socket pair; nothing that is done with it blocks.

    Args:
        rank: the rank's number, for the log.
        connection: the agent's end, which belongs to the link from here on.
        selector: selector of the loop.
        on_readable: called by the loop when there is something to :meth:`receive`.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        on_readable: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self._rank = rank
        self._connection = connection
        self._selector = selector
        self._lines = LineBuffer()
        selector.register(connection, selectors.EVENT_READ, on_readable)

    def send(self, message: AgentMessage) -> bool:
        """Send ``message`` to the rank.

        Returns:
            False if the rank cannot be reached: it has ended, or has read nothing for a long time.
        """
        try:
            data = encode(message)
            return self._connection.send(data) == len(data)
        except OSError as error:
            logger.info("rank %d cannot be told %r: %s", self._rank, message.type, error)
            return False

    def receive(self) -> list[RankMessage] | None:
        """Return the messages that are complete after one read; None if there was nothing to read.

        Raises:
            EOFError: the rank has hung up.
            ProtocolError: the rank does not keep to the protocol.
        """
        try:
            data = self._connection.recv(64 * 1024)
        except BlockingIOError:
            return None
        except OSError as error:
            logger.info("rank %d hung up: %s", self._rank, error)
            data = b""
        if not data:
            raise EOFError
        return [FROM_RANK.decode(line) for line in self._lines.feed(data)]

    def close(self) -> None:
        """Close the connection, and take it from the loop."""
        self._selector.unregister(self._connection)
        self._connection.close()
