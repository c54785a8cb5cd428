"""Health, status and metrics over HTTP, read-only: ``/healthz``, ``/status`` and ``/metrics``, listed at ``/``."""

from __future__ import annotations

import contextlib
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

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from checkpointless.observability.monitoring.metrics import Metrics, RunLog, Snapshot

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32  # the oldest connection makes room for a new one
REQUEST_TIMEOUT_S = 5.0  # for each read from a client, and each write to it
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
class _Page:
    status: HTTPStatus
    content_type: str
    body: bytes


class _Watched(Protocol):
    """Where a loop leaves what it sees, for another thread to read."""

    snapshot: Snapshot
    metrics: Metrics
    run_log: RunLog | None  # None where there is no event log


def _page_at(path: str, watch: _Watched) -> _Page | None:
    """Return the page at exactly this path, made from the snapshot; None if there is none."""
    now, run_log = watch.snapshot, watch.run_log
    if path == "/":
        return _Page(HTTPStatus.OK, TEXT, PATHS.encode())
    if path == "/healthz":
        well, words = now.health(time.monotonic())
        return _Page(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{words}\n".encode())
    if path not in ("/status", "/metrics"):
        return None
    is_known = now.looked_at_s is None or now.job is not None  # the account is the run's, so once for all nodes
    account = run_log.ask(now.high_water, has_account=is_known) if run_log is not None else None
    account = account if now.job is not None else None
    if path == "/status":
        goodput = account.goodput if account is not None else None
        said = {**_plain(now), "goodput": None if goodput is None else goodput.as_json()}
        return _Page(HTTPStatus.OK, _JSON, json.dumps(said, default=_plain).encode() + b"\n")
    found = watch.metrics.page(now, account, has_log=run_log is not None)
    return _Page(HTTPStatus.OK, CONTENT_TYPE_LATEST, found)


def _plain(value: object) -> dict[str, object]:
    return {key: item for key, item in vars(value).items() if key != "looked_at_s"}  # on this machine's own clock


class _StatusHandler(BaseHTTPRequestHandler):
    """Answers one request with a page; what follows the request's headers is ignored."""

    server: _StatusServer
    timeout = REQUEST_TIMEOUT_S
    command = ""
    requestline = ""

    def parse_request(self) -> bool:
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
        with self.server.turn:  # one client at a time is worked for, so the loop shares the interpreter with one
            page = _page_at(self.path.partition("?")[0], self.server.watch)
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            self._send(page)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with the status code's standard phrase, so that nothing of the request is sent back."""
        status = HTTPStatus(code)
        self.request_version = self.protocol_version  # a broken request line gets headers, too
        paths = PATHS if status is HTTPStatus.NOT_FOUND else ""
        self._send(_Page(status, TEXT, f"{status.phrase}\n{paths}".encode()))

    def version_string(self) -> str:
        return "checkpointless"

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("HTTP: %r", args)

    def _send(self, page: _Page) -> None:
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


class _StatusServer(ThreadingHTTPServer):
    """The standard library's server, with a limit on connections."""

    request_queue_size = 128

    def __init__(
        self, where: tuple[str, int], family: socket.AddressFamily, watch: _Watched, name: str = ""
    ) -> None:
        self.address_family = family
        self.watch = watch
        self.turn = threading.Lock()
        self._names = {name.lower(), "localhost"} if ip_address(where[0]).is_loopback else None
        self._clients: dict[threading.Thread, socket.socket] = {}
        super().__init__(where, _StatusHandler)

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

    def server_bind(self) -> None:
        """Bind as ``socket.create_server`` does: without looking up this host's name, which may take long."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: _Request, client_address: object) -> None:
        """Serve a client in a thread; if there are too many clients, the oldest makes room first."""
        self._clients = {thread: client for thread, client in self._clients.items() if thread.is_alive()}
        if len(self._clients) >= MAX_CONNECTIONS:
            oldest = next(iter(self._clients))
            _hang_up(self._clients.pop(oldest))
            oldest.join(_POLL_S)
        serve, arguments = self.process_request_thread, (request, client_address)
        thread = threading.Thread(target=serve, args=arguments, name="checkpointless-http-client", daemon=True)
        self._clients[thread] = cast(socket.socket, request)
        thread.start()

    def handle_error(self, request: _Request, client_address: object) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            logger.debug("HTTP: %s", error)
        else:
            logger.exception("HTTP: a request could not be answered")

    def close(self) -> None:
        """Stop ``serve_forever``, which runs in another thread, and close every connection."""
        self.shutdown()
        self.server_close()
        for client in self._clients.values():
            _hang_up(client)
        by_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._clients:
            thread.join(max(0.0, by_s - time.monotonic()))


def _hang_up(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        client.shutdown(socket.SHUT_RDWR)


class HttpStatus(contextlib.AbstractContextManager["HttpStatus"]):
    """Serves a watch's snapshots from :meth:`open` until :meth:`close`, or in a ``with`` block."""

    def __init__(self, host: str, port: int, watch: _Watched) -> None:
        self.watch = watch
        self._where = (host, port)
        self._server: _StatusServer | None = None
        self._thread: threading.Thread | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, say: Callable[[str], None]) -> None:
        """Start serving; ``OSError`` if the address cannot be bound to."""
        host, port = self._where
        try:
            family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _StatusServer((str(where[0]), int(where[1])), family, self.watch, host)
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
        if self._server is not None and self._thread is not None:
            self._server.close()
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self.watch.run_log is not None:
            self.watch.run_log.close()


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
