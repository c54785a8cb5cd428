"""Test a connection's limits on bytes, time and turns, and its end from another thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from checkpointless.monitoring.bounded_connection import BoundedConnection, RequestTooLargeError


@contextmanager
def pair(**limits: Any) -> Iterator[tuple[socket.socket, BoundedConnection, threading.Lock]]:
    """Yield a client, the connection that was accepted from it, and the connection's turn, which is held."""
    client, accepted = socket.socketpair()
    turn = threading.Lock()
    settings = {"timeout_s": 20.0, "max_bytes": 100, "pause_s": 0.0} | limits
    with client, BoundedConnection(accepted, turn=turn, **settings) as connection, turn:
        yield client, connection, turn


def read(connection: BoundedConnection) -> bytes:
    buffer = bytearray(64)
    return bytes(buffer[: connection.recv_into(buffer)])


def test_it_takes_over_the_descriptor() -> None:
    with pair() as (client, connection, _):
        client.sendall(b"ping")
        assert read(connection) == b"ping"
        connection.sendall(b"pong")
        assert client.recv(64) == b"pong"


def test_too_many_bytes_are_refused() -> None:
    with pair() as (client, connection, _):
        client.sendall(b"x" * 101)
        assert read(connection) == b"x" * 64
        with pytest.raises(RequestTooLargeError, match="over 100 bytes"):
            read(connection)


def test_a_client_that_ends_is_no_empty_read() -> None:
    with pair() as (client, connection, _):
        client.close()
        with pytest.raises(ConnectionAbortedError):
            read(connection)


def test_the_time_counts_from_the_start_for_reads_and_writes() -> None:
    with pair(timeout_s=0.3) as (client, connection, turn):
        client.sendall(b"x")
        assert read(connection) == b"x"
        with pytest.raises(TimeoutError):
            read(connection)
        client.sendall(b"x")
        for late in (lambda: read(connection), lambda: connection.sendall(b"x")):
            with pytest.raises(TimeoutError):
                late()
        assert turn.locked()


def test_who_takes_nothing_is_not_waited_for() -> None:
    with pair(timeout_s=0.3) as (_, connection, _turn), pytest.raises(TimeoutError):
        connection.sendall(b"x" * (64 << 20))


def test_reads_have_pauses_in_which_bytes_gather() -> None:
    with pair(pause_s=0.2) as (client, connection, _):
        client.sendall(b"a")
        began_s = time.monotonic()
        assert read(connection) == b"a"
        for byte in (b"b", b"c", b"d"):
            client.sendall(byte)
        assert read(connection) == b"bcd"
        assert time.monotonic() - began_s >= 0.2


def test_others_have_the_turn_while_it_waits() -> None:
    with pair() as (client, connection, turn):

        def answer() -> None:
            with turn:
                client.sendall(b"x")

        threading.Thread(target=answer).start()
        assert read(connection) == b"x"
        assert turn.locked()


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
def test_dropping_ends_a_wait(pause_s: float) -> None:
    with pair(pause_s=pause_s) as (client, connection, turn):
        client.sendall(b"x")
        read(connection)
        threading.Timer(0.1, connection.drop).start()
        began_s = time.monotonic()
        with pytest.raises(ConnectionAbortedError):
            read(connection)
        assert time.monotonic() - began_s < 10
        assert turn.locked()


def test_dropping_what_is_closed_touches_no_other_file() -> None:
    """The next file that is opened has the same descriptor."""
    with pair() as (_, connection, _turn):
        number = connection.fileno()
        connection.close()
        one, other = socket.socketpair()
        with one, other:
            assert number in (one.fileno(), other.fileno())
            connection.drop()
            one.sendall(b"x")
            assert other.recv(1) == b"x"
