"""Health, status and metrics over HTTP, read-only: ``/healthz``, ``/status`` and ``/metrics``.

One daemon thread serves them from the snapshot of the agent, or of a coordinator in a separate process. It never
waits for a client and never makes the loop wait: a slow client loses its connection, and a flood of requests is
handled at a fixed pace.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Protocol

from checkpointless.monitoring.durations import Durations
from checkpointless.monitoring.measured import Measuring
from checkpointless.monitoring.snapshot import Snapshot

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32  # the oldest connection makes room for a new one
MAX_REQUEST_BYTES = 8 * 1024
REQUEST_TIMEOUT_S = 5.0  # from the start of the connection until the client has taken the answer
_TURN_S = 0.02  # the pause after each turn, which bounds what a flood can cost
_ACCEPTS_PER_TURN = 4
_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"


@dataclass(frozen=True)
class Page:
    """An HTTP response."""

    status: HTTPStatus
    content_type: str
    body: bytes


class Watched(Protocol):
    """Where a loop leaves what it sees, for another thread to read."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest look at the job."""

    @property
    def measuring(self) -> Measuring | None:
        """Reads what the ranks of this node measured; None where there is no event log."""


class Pages:
    """The pages that can be read, each made from a snapshot on request, once per snapshot.

    Args:
        watch: holds the snapshot.

    Attributes:
        lacks: why there are no metrics ("" if there are).
    """

    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._made: dict[str, tuple[Snapshot, Page]] = {}
        self._pages: dict[str, Callable[[Snapshot], Page]] = {"/status": _status}
        self.lacks = ""
        try:
            from checkpointless.monitoring import prometheus
        except ImportError as error:
            self.lacks = f"/metrics needs {error.name}: pip install 'checkpointless[metrics]'"
            page = Page(HTTPStatus.NOT_IMPLEMENTED, _TEXT, f"{self.lacks}\n".encode())
            self._pages["/metrics"] = lambda _: page
        else:

            def rendered(now: Snapshot) -> Page:
                measured = watch.measuring.ask() if watch.measuring is not None else None
                return Page(HTTPStatus.OK, prometheus.CONTENT_TYPE, prometheus.render(now, measured))

            self._pages["/metrics"] = rendered

    def at(self, path: str) -> Page | None:
        """Return the page at exactly this path, or None if there is none."""
        snapshot = self._watch.snapshot
        if path == "/healthz":
            well, words = snapshot.health(time.monotonic())
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            return Page(status, _TEXT, f"{words}\n".encode())
        make = self._pages.get(path)
        if make is None:
            return None
        of, page = self._made.get(path, (None, None))
        if page is None or of is not snapshot:
            page = make(snapshot)
            self._made[path] = (snapshot, page)
        return page


def answer(head: bytes, pages: Pages) -> bytes:
    """Return the answer to a request.

    Args:
        head: the request line and headers; what follows them is ignored.
    """
    return _Request(head, pages).wfile.getvalue()


class _Request(BaseHTTPRequestHandler):
    """The standard library's parser and writer, working on memory."""

    wfile: io.BytesIO  # type: ignore[assignment]

    def __init__(self, head: bytes, pages: Pages) -> None:  # no super().__init__: it needs a connection and waits
        self.rfile = io.BytesIO(head)
        self.wfile = io.BytesIO()
        self.client_address = ("", 0)
        self.command = ""
        self.requestline = ""
        self.request_version = self.default_request_version
        self.raw_requestline = self.rfile.readline()
        if len(head) > MAX_REQUEST_BYTES:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if not self.parse_request():
            return
        if self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return
        page = pages.at(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(page)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the status code's standard phrase, so that nothing of the request is sent back."""
        status = HTTPStatus(code)
        self.request_version = self.protocol_version  # a broken request line gets headers, too
        self._send(Page(status, _TEXT, f"{status.phrase}\n".encode()))

    def version_string(self) -> str:
        """Return a name that does not tell which Python this is."""
        return "checkpointless"

    def log_message(self, format: str, *args: object) -> None:
        """Log at debug level only."""
        logger.debug("HTTP: %r", args)

    def _send(self, page: Page) -> None:
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)


@dataclass(eq=False)
class _Client:
    """A connection.

    Attributes:
        until_s: when the connection is closed, whatever its state.
        head: the bytes that have come.
        reply: the bytes that are still to be sent; None before the request is complete.
    """

    connection: socket.socket
    until_s: float
    head: bytearray = field(default_factory=bytearray)
    reply: memoryview | None = None


class HttpStatus:
    """Serves a watch's snapshots from :meth:`open` until :meth:`close`, or in a ``with`` block.

    Args:
        host: the address to bind to.
        port: the port to bind to (0: any).
        watch: holds the snapshots.
    """

    def __init__(self, host: str, port: int, watch: Watched) -> None:
        self.watch = watch
        self._where = (host, port)
        self._pages = Pages(watch)
        self._clients: list[_Client] = []  # oldest first
        self._closing = threading.Event()
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> HttpStatus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, say: Callable[[str], None]) -> None:
        """Start serving.

        Args:
            say: called with a line that says where.

        Raises:
            OSError: the address cannot be bound to.
        """
        host, port = self._where
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family, backlog=128)
        except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a host name
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(error)
            what = f"cannot serve {_url(host, port)}: {reason}; choose another --http-port or --http-host"
            raise OSError(what) from error
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(
            target=self._serve, args=(listener, self._selector), name="checkpointless-http", daemon=True
        )
        self._thread.start()
        say(f"health and metrics at {_url(host, listener.getsockname()[1])} (/healthz, /status, /metrics)")
        if self._pages.lacks:
            say(self._pages.lacks)

    def close(self) -> None:
        """Stop serving and close every connection."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self.watch.measuring is not None:
            self.watch.measuring.close()

    def _serve(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        accept = functools.partial(self._accept, listener, selector)
        selector.register(listener, selectors.EVENT_READ, accept)
        try:
            while not self._closing.wait(_TURN_S):
                for key, _ in selector.select(_POLL_S):
                    key.data()
                now_s = time.monotonic()
                while self._clients and now_s >= self._clients[0].until_s:
                    self._drop(self._clients[0], selector)
        finally:
            for client in list(self._clients):
                self._drop(client, selector)
            selector.close()
            listener.close()

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = listener.accept()
            except OSError:  # no client waits, the one that waited has gone, or no descriptor is left
                return
            connection.setblocking(False)
            if len(self._clients) >= MAX_CONNECTIONS:
                self._drop(self._clients[0], selector)
            client = _Client(connection, time.monotonic() + REQUEST_TIMEOUT_S)
            self._clients.append(client)
            turn = functools.partial(self._turn, client, selector)
            selector.register(connection, selectors.EVENT_READ, turn)
            turn()

    def _turn(self, client: _Client, selector: selectors.BaseSelector) -> None:
        """Read once and write once, as far as either is possible."""
        if client not in self._clients:  # dropped after it was found to be ready
            return
        try:
            over = self._read(client, selector) if client.reply is None else False
            if client.reply is not None:
                client.reply = client.reply[client.connection.send(client.reply) :]
                over = not client.reply
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("HTTP: %s", error)
            over = True
        except Exception:
            logger.exception("HTTP: a request could not be answered")
            over = True
        if over:
            self._drop(client, selector)

    def _read(self, client: _Client, selector: selectors.BaseSelector) -> bool:
        """Take what has come, and make the reply if it is enough for one.

        Returns:
            Whether the client has gone.
        """
        data = client.connection.recv(MAX_REQUEST_BYTES)
        client.head += data
        if b"\r\n\r\n" in client.head or b"\n\n" in client.head or len(client.head) > MAX_REQUEST_BYTES:
            client.reply = memoryview(answer(bytes(client.head), self._pages))
            turn = functools.partial(self._turn, client, selector)
            selector.modify(client.connection, selectors.EVENT_WRITE, turn)
        return not data

    def _drop(self, client: _Client, selector: selectors.BaseSelector) -> None:
        self._clients.remove(client)
        selector.unregister(client.connection)
        client.connection.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _status(snapshot: Snapshot) -> Page:
    return Page(HTTPStatus.OK, _JSON, json.dumps(snapshot, default=_plain).encode() + b"\n")


def _plain(value: object) -> dict[str, object]:
    if isinstance(value, Durations):
        return {"count": value.counts[-1], "seconds": round(value.seconds, 3)}
    return {key: item for key, item in vars(value).items() if key != "looked_at_s"}  # on this machine's own clock
