"""A client's connection that bounds what the client can cost: bytes, time, and how often it is listened to."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)


class RequestTooLargeError(Exception):
    """The client has sent more than a request may have."""


class BoundedConnection(socket.socket):
    """An accepted connection, read and written by one thread as :mod:`http.server` does it.

    That thread holds ``turn`` and gives it away while it waits for the client. So of all threads that share a turn,
    one at a time needs the interpreter, and a flood costs the other threads of the process no more than one client.

    Args:
        accepted: the accepted socket, whose descriptor this connection takes over.
        turn: held by the thread that works.
        timeout_s: seconds from now after which every read and write ends with ``TimeoutError``.
        max_bytes: how many bytes may be read.
        pause_s: seconds to wait before each read but the first.
    """

    def __init__(
        self, accepted: socket.socket, *, turn: threading.Lock, timeout_s: float, max_bytes: int, pause_s: float
    ) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._turn = turn
        self._until_s = time.monotonic() + timeout_s
        self._max_bytes = max_bytes
        self._pause_s = pause_s
        self._bytes_heard = 0
        self._dropped = threading.Event()
        self._ending = threading.Lock()  # a descriptor that was closed may be another file's already

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """Read what has come, or wait for something to come.

        Returns:
            The number of bytes that were read; never 0.

        Raises:
            ConnectionAbortedError: the client sends nothing more, or the connection was dropped.
            RequestTooLargeError: the client has sent more than ``max_bytes``.
            TimeoutError: the time is up.
        """
        with self._waiting():
            if self._bytes_heard and self._dropped.wait(self._pause_s):
                raise ConnectionAbortedError("it was dropped")
            self.settimeout(self._left_s())
            nbytes_read = super().recv_into(buffer, nbytes, flags)
        if not nbytes_read:
            raise ConnectionAbortedError("it ended before the request was complete")
        self._bytes_heard += nbytes_read
        if self._bytes_heard > self._max_bytes:
            raise RequestTooLargeError(f"a request is over {self._max_bytes} bytes")
        return nbytes_read

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """Write ``data``.

        Raises:
            TimeoutError: the client has not taken all of it in time.
        """
        with self._waiting():
            self.settimeout(self._left_s())
            super().sendall(data, flags)

    def drop(self) -> None:
        """End the connection from another thread; the one that reads or writes gets an ``OSError``."""
        self._dropped.set()
        with self._ending:
            if self.fileno() < 0:
                return
            try:
                self.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("HTTP: %s", error)

    def close(self) -> None:
        """Close the descriptor."""
        with self._ending:
            super().close()

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time for the request is up")
        return left_s

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
