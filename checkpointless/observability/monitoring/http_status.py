"""Health, status and metrics over HTTP, read-only: ``/healthz``, ``/status`` and ``/metrics``, listed at ``/``.

Daemon threads serve them from the snapshot of the agent, or of a coordinator in a separate process: one accepts
clients, and each client has one. They never make the loop wait: a slow client loses its connection, and a flood is
accepted at a fixed pace.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Protocol, TypeAlias, cast
from urllib.parse import urlsplit

from checkpointless.observability.monitoring import prometheus
from checkpointless.observability.monitoring.accounting import Accounting
from checkpointless.observability.monitoring.durations import Durations
from checkpointless.observability.monitoring.measured import Measuring
from checkpointless.observability.monitoring.snapshot import JobNames, Snapshot

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32  # the oldest connection makes room for a new one
REQUEST_TIMEOUT_S = 5.0  # from the start of the connection until the client has taken the answer
_ACCEPT_PAUSE_S = 0.005  # after each connection, which bounds what a flood can cost
_POLL_S = 0.2
_CLOSE_TIMEOUT_S = 5.0
_Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]

TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
#: What there is, for ``/`` and for whoever asks for something else.
PATHS = """\
/healthz  200 while the job goes on, else 503
/status   the ranks, and where the coordinator is the job, as JSON
/metrics  for Prometheus
"""


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

    @property
    def accounting(self) -> Accounting | None:
        """Reads what the run's time was spent on; None where there is no event log."""

    @property
    def names(self) -> JobNames:
        """What the job is called."""


class Pages:
    """The pages that can be read, each made from a snapshot on request, once per snapshot.

    One thread at a time may use them.

    Args:
        watch: holds the snapshot.
    """

    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._made: dict[str, tuple[Snapshot, Page]] = {}
        self._pages: dict[str, Callable[[Snapshot], Page]] = {"/status": _status, "/metrics": self._metrics}

    def at(self, path: str) -> Page | None:
        """Return the page at exactly this path, or None if there is none."""
        snapshot = self._watch.snapshot
        if path == "/":
            return Page(HTTPStatus.OK, TEXT, PATHS.encode())
        if path == "/healthz":
            well, words = snapshot.health(time.monotonic())
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            return Page(status, TEXT, f"{words}\n".encode())
        make = self._pages.get(path)
        if make is None:
            return None
        of, page = self._made.get(path, (None, None))
        if page is None or of is not snapshot:
            page = make(snapshot)
            self._made[path] = (snapshot, page)
        return page

    def _metrics(self, now: Snapshot) -> Page:
        watch = self._watch
        measured = watch.measuring.ask() if watch.measuring is not None else None
        account = None
        if watch.accounting is not None and now.job is not None:  # the run's, so once for all nodes
            account = watch.accounting.ask(now.high_water)
        return Page(HTTPStatus.OK, prometheus.CONTENT_TYPE, prometheus.render(now, measured, account, watch.names))


def _status(snapshot: Snapshot) -> Page:
    return Page(HTTPStatus.OK, _JSON, json.dumps(snapshot, default=_plain).encode() + b"\n")


def _plain(value: object) -> dict[str, object]:
    if isinstance(value, Durations):
        return {"count": value.counts[-1], "seconds": round(value.seconds, 3)}
    return {key: item for key, item in vars(value).items() if key != "looked_at_s"}  # on this machine's own clock


class StatusHandler(BaseHTTPRequestHandler):
    """Answers one request with a page of the server; what follows the request's headers is ignored."""

    server: StatusServer
    command = ""
    requestline = ""

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
        page = self.server.page_at(self.path.partition("?")[0])
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
    """The standard library's server with limits on connections.

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
        self._pages = pages
        self._turn = threading.Lock()
        self._clients: list[tuple[socket.socket, threading.Thread, float]] = []  # until when each may stay
        self._ending = threading.Lock()  # a descriptor that was closed may be another file's already
        super().__init__(where, StatusHandler)

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

    def page_at(self, path: str) -> Page | None:
        """Return the page at this path, or None; of all clients one at a time is worked for."""
        with self._turn:
            return self._pages.at(path)

    def close(self) -> None:
        """Stop ``serve_forever``, which runs in another thread, and close every connection."""
        self.shutdown()
        self.server_close()
        by_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for request, _, _ in self._clients:
            self._drop(request)
        for _, thread, _ in self._clients:
            thread.join(max(0.0, by_s - time.monotonic()))

    def server_bind(self) -> None:
        """Bind as ``socket.create_server`` does: without looking up this host's name, which may take long."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def service_actions(self) -> None:
        """Drop clients whose time is up; called after each connection, and several times per second."""
        self._keep(MAX_CONNECTIONS)
        time.sleep(_ACCEPT_PAUSE_S)

    def process_request(self, request: _Request, client_address: object) -> None:
        """Serve a client in a thread; if there are too many clients, the oldest makes room first."""
        self._keep(MAX_CONNECTIONS - 1)
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="checkpointless-http-client",
            daemon=True,
        )
        thread.start()
        self._clients.append((cast(socket.socket, request), thread, time.monotonic() + REQUEST_TIMEOUT_S))

    def close_request(self, request: _Request) -> None:
        """Close a connection whose client was served."""
        with self._ending:
            super().close_request(request)

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Log why a client was not answered."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            logger.debug("HTTP: %s", error)
        else:
            logger.exception("HTTP: a request could not be answered")

    def _keep(self, most: int) -> None:
        """Drop clients whose time is up, and the oldest ones while there are more than ``most``."""
        self._clients = [client for client in self._clients if client[1].is_alive()]
        for index, (request, thread, until_s) in enumerate(self._clients):
            is_surplus = index < len(self._clients) - most
            if is_surplus or time.monotonic() > until_s:
                self._drop(request)
            if is_surplus:
                thread.join(_POLL_S)

    def _drop(self, request: socket.socket) -> None:
        with self._ending:
            if request.fileno() < 0:
                return
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                logger.debug("HTTP: %s", error)


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
        serve = functools.partial(self._server.serve_forever, _POLL_S)
        self._thread = threading.Thread(target=serve, name="checkpointless-http", daemon=True)
        self._thread.start()
        say(f"health and metrics at {_url(host, self._server.server_port)} (/healthz, /status, /metrics)")

    def close(self) -> None:
        """Stop serving and close every connection."""
        if self._server is not None and self._thread is not None:
            self._server.close()
            self._thread.join(_CLOSE_TIMEOUT_S)
        for reader in (self.watch.measuring, self.watch.accounting):
            if reader is not None:
                reader.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
