"""Test how the server of health, status and metrics takes what it is sent."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.agent.watch import Watch
from checkpointless.observability.monitoring import http_status
from checkpointless.observability.monitoring.http_status import MAX_CONNECTIONS, HttpStatus
from tests.descriptors import descriptors
from tests.unit.monitoring.test_pages import SNAPSHOT, answer, pages_of

# ---- requests


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /status HTTP/1.0", 200),
        ("HEAD /status HTTP/1.1", 200),
        ("POST /status HTTP/1.1", 405),
        ("DELETE / HTTP/1.1", 405),
        ("GET / HTTP/1.1", 200),
        ("GET /status/ HTTP/1.1", 404),
        ("GET /../../etc/passwd HTTP/1.1", 404),
        ("GET /..%2f..%2fetc/passwd HTTP/1.1", 404),
        ("GET http://elsewhere/status HTTP/1.1", 404),
        ("CONNECT elsewhere:443 HTTP/1.1", 405),
        ("GET /status HTTP/9.9", 505),
        ("GET /status HTTP/x", 400),
        ("SSH-2.0-OpenSSH_9.6", 400),
        pytest.param(f"GET /{'x' * 70_000} HTTP/1.1", 414, id="too long"),
        pytest.param("GET /status HTTP/1.1" + "\r\na:" * 1000, 431, id="too many headers"),
        ("", 400),
    ],
)
def test_requests(request_line: str, status: int) -> None:
    reply = answer(f"{request_line}\r\nHost: here\r\n\r\n".encode(), pages_of(SNAPSHOT))
    if not request_line:
        assert reply == b""
        return
    assert reply.startswith(f"HTTP/1.0 {status} ".encode())
    assert b"etc" not in reply
    assert reply.endswith(b"\r\n\r\n") == request_line.startswith("HEAD")


@given(st.binary(max_size=300), st.sampled_from([b"", b"GET ", b"GET /status ", b"HEAD / HTTP/1.1\r\n"]))
def test_no_request_is_too_strange(garbage: bytes, begin: bytes) -> None:
    reply = answer(begin + garbage + b"\r\n\r\n", pages_of(SNAPSHOT))
    assert reply == b"" or reply.startswith(b"HTTP/1.0 ") or b"high_water" in reply


# ---- the server


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Yield the address of a server, and check that nothing of it is left afterwards."""
    threads, opened = set(threading.enumerate()), descriptors()  # those of earlier tests may end meanwhile
    watch, said = Watch(0), list[str]()
    with HttpStatus("127.0.0.1", 0, watch) as http:
        http.open(said.append)
        watch.snapshot = SNAPSHOT
        port = int(said[0].split("127.0.0.1:")[1].split()[0])
        yield "127.0.0.1", port
    assert set(threading.enumerate()) <= threads
    assert descriptors() <= opened
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def ask(where: tuple[str, int], path: str = "/status", headers: str = "") -> bytes:
    with socket.create_connection(where, timeout=60) as client:
        client.sendall(f"GET {path} HTTP/1.0\r\n{headers}\r\n".encode())
        return b"".join(iter(lambda: client.recv(65536), b""))


OWN_NAMES = ("localhost:9400", "LOCALHOST", "127.0.0.1:9400", "[::1]:9400", "10.1.2.3")


@pytest.mark.parametrize("host", [*OWN_NAMES, "rebound.example:9400", "localhost.rebound.example", "["])
def test_a_server_on_loopback_answers_to_no_sites_name(host: str) -> None:
    status = 200 if host in OWN_NAMES else 421
    with serving() as where:
        assert ask(where, headers=f"Host: {host}\r\n").startswith(f"HTTP/1.0 {status} ".encode())


@pytest.mark.slow
def test_who_is_slow_keeps_nobody_waiting_and_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_status._StatusHandler, "timeout", 3.0)
    with serving() as where:
        slow = [socket.create_connection(where, timeout=60) for _ in range(MAX_CONNECTIONS - 2)]
        for client in slow[::2]:
            client.sendall(b"GET /st")
        assert b"high_water" in ask(where)
        assert b"high_water" in ask(where, "/status?" + "x" * 8000)
        for client in slow:
            with client:
                assert not client.recv(100).startswith(b"HTTP/1.0 200")


def test_no_more_clients_have_threads_than_there_may_be_connections() -> None:
    with serving() as where:
        before = set(threading.enumerate())
        crowd = [socket.create_connection(where, timeout=60) for _ in range(2 * MAX_CONNECTIONS)]
        assert b"high_water" in ask(where)  # this came last, so all others were accepted
        assert sum(is_open(client) for client in crowd) <= MAX_CONNECTIONS
        assert len(set(threading.enumerate()) - before) <= MAX_CONNECTIONS
        for client in crowd:
            client.close()


def is_open(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_closing_does_not_wait_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_status._StatusHandler, "timeout", 600.0)
    said, before = list[str](), set(threading.enumerate())
    http = HttpStatus("127.0.0.1", 0, Watch(0))
    http.open(said.append)
    where = ("127.0.0.1", int(said[0].split("127.0.0.1:")[1].split()[0]))
    crowd = [socket.create_connection(where, timeout=60) for _ in range(8)]
    for client in crowd:
        client.sendall(b"GET /st")
    assert b"high_water" in ask(where)
    began_s = time.monotonic()
    http.close()
    assert time.monotonic() - began_s < 300.0
    assert set(threading.enumerate()) <= before
    for client in crowd:
        assert not is_open(client)
        client.close()


def test_nothing_is_written_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as where:
        ask(where, "/none")
        for garbage in (b"\0\0\r\n\r\n", b"GET /status HTTP/9.9\r\n"):
            with socket.create_connection(where, timeout=60) as client:
                client.sendall(garbage)
        monkeypatch.setattr(http_status, "_page_at", lambda *_: 1 / 0)
        assert ask(where) == b""
    assert capfd.readouterr() == ("", "")
    (told,) = [record.message for record in caplog.records if record.levelname != "DEBUG"]
    assert told == "HTTP: a request could not be answered"


@pytest.mark.parametrize("host", ["not-a-host.invalid", "a..b", "203.0.113.7"])
def test_an_address_that_cannot_be_bound_to_is_named(host: str) -> None:
    with HttpStatus(host, 0, Watch(0)) as http, pytest.raises(OSError, match=f"serve http://{host}:0: .*--http"):
        http.open(lambda _: None)
