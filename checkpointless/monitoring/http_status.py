"""Health, status and metrics over HTTP, read-only: ``/healthz``, ``/status`` and ``/metrics``, listed at ``/``.

Daemon threads serve them from the snapshot of the agent, or of a coordinator in a separate process: one accepts
clients, and each client has one. They never make the loop wait: a slow client loses its connection, a flood is
accepted at a fixed pace, and of all these threads one at a time does more than wait.
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any, cast
from urllib.parse import urlsplit

from checkpointless.monitoring.bounded_connection import BoundedConnection, RequestTooLargeError
from checkpointless.monitoring.pages import PATHS, TEXT, Page, Pages, Watched

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32  # the oldest connection makes room for a new one
MAX_REQUEST_BYTES = 8 * 1024
REQUEST_TIMEOUT_S = 5.0  # from the start of the connection until the client has taken the answer
_ACCEPT_PAUSE_S = 0.005  # after each connection, which bounds what a flood can cost
_READ_PAUSE_S = 0.02  # before each read but the first, for the same reason
_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 5.0


class StatusHandler(BaseHTTPRequestHandler):
    """Answers one request with a page of the server; what follows the request's headers is ignored."""

    server: StatusServer
    command = ""
    requestline = ""

    def handle_one_request(self) -> None:
        """Read a request and answer it."""
        try:
            super().handle_one_request()
        except RequestTooLargeError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def parse_request(self) -> bool:
        """Return whether this is a request that a page may answer; any other is refused."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
            return False
        if not self.server.answers_to(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return False
        return True

    def do_GET(self) -> None:
        """Send the page, or 404."""
        page = self.server.pages.at(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(page)

    def do_HEAD(self) -> None:
        """Send the headers of the page, or of 404."""
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the status code's standard phrase, so that nothing of the request is sent back."""
        status = HTTPStatus(code)
        self.request_version = self.protocol_version  # a broken request line gets headers, too
        paths = PATHS if status is HTTPStatus.NOT_FOUND else ""
        self._send(Page(status, TEXT, f"{status.phrase}\n{paths}".encode()))

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


class StatusServer(ThreadingHTTPServer):
    """The standard library's server with limits on connections; :class:`HttpStatus` has its loop.

    Args:
        where: address and port to bind to.
        family: the address's family.
        pages: what is served.
        name: the name that the address was given by.

    Raises:
        OSError: the address cannot be bound to.
    """

    request_queue_size = 128

    def __init__(self, where: tuple[str, int], family: socket.AddressFamily, pages: Pages, name: str = "") -> None:
        self.address_family = family
        self._names = {name.lower(), "localhost"} if ip_address(where[0]).is_loopback else None
        self.pages = pages
        self._turn = threading.Lock()
        self._clients: list[tuple[BoundedConnection, threading.Thread]] = []  # oldest first
        self._closing = threading.Event()
        super().__init__(where, StatusHandler)
        self.socket.settimeout(_POLL_S)  # how long to wait for a client, and for one that has gone meanwhile

    def answers_to(self, host: str) -> bool:
        """Return whether a request with this ``Host`` is meant for this server.

        A page of any site can have its own name point to 127.0.0.1, and its visitor's browser then reads what is
        served there. So a server on loopback answers to no name that it does not know; a number is no site's name.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return self._names is None or name in ("", *self._names) or bool(ip_address(name))
        except ValueError:
            return False

    def serve(self) -> None:
        """Accept connections until :meth:`close`."""
        while not self._closing.wait(_ACCEPT_PAUSE_S):
            self.handle_request()

    def stop(self) -> None:
        """End :meth:`serve` soon."""
        self._closing.set()

    def close(self, by_s: float) -> None:
        """Close every connection; call it after :meth:`serve` has ended.

        Args:
            by_s: until when the clients' threads are waited for, on the monotonic clock.
        """
        self.server_close()
        for connection, _ in self._clients:
            connection.drop()
        for _, thread in self._clients:
            thread.join(max(0.0, by_s - time.monotonic()))

    def server_bind(self) -> None:
        """Bind as ``socket.create_server`` does: without looking up this host's name, which may take long."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, whose time begins."""
        accepted, address = self.socket.accept()
        return (
            BoundedConnection(
                accepted,
                turn=self._turn,
                timeout_s=REQUEST_TIMEOUT_S,
                max_bytes=MAX_REQUEST_BYTES,
                pause_s=_READ_PAUSE_S,
            ),
            address,
        )

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Serve a client in a thread; if there are too many clients, the oldest makes room first."""
        while len(self._living()) >= MAX_CONNECTIONS and not self._closing.is_set():
            connection, thread = self._clients[0]
            connection.drop()
            thread.join(_POLL_S)
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="checkpointless-http-client",
            daemon=True,
        )
        thread.start()
        self._clients.append((cast(BoundedConnection, request), thread))

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer a client, as the only thread that works."""
        with self._turn:
            super().finish_request(request, client_address)

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Log why a client was not answered."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            logger.debug("HTTP: %s", error)
        else:
            logger.exception("HTTP: a request could not be answered")

    def _living(self) -> list[tuple[BoundedConnection, threading.Thread]]:
        self._clients = [client for client in self._clients if client[1].is_alive()]
        return self._clients


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
        self._server: StatusServer | None = None
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
            self._server = StatusServer((str(where[0]), int(where[1])), family, self._pages, host)
        except (OSError, UnicodeError) as error:  # UnicodeError: the host cannot be a host name
            number = getattr(error, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(error)
            what = f"cannot serve {_url(host, port)}: {reason}; choose another --http-port or --http-host"
            raise OSError(what) from error
        self._thread = threading.Thread(target=self._server.serve, name="checkpointless-http", daemon=True)
        self._thread.start()
        say(f"health and metrics at {_url(host, self._server.server_port)} (/healthz, /status, /metrics)")

    def close(self) -> None:
        """Stop serving and close every connection."""
        if self._server is not None and self._thread is not None:
            by_s = time.monotonic() + _CLOSE_TIMEOUT_S
            self._server.stop()
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._server.close(by_s)
        for reader in (self.watch.measuring, self.watch.accounting):
            if reader is not None:
                reader.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
