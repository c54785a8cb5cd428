"""Test which descriptors are taken for connections of process groups."""

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators import gloo_sockets
from checkpointless.inprocess.communicators.gloo_sockets import GlooSockets
from checkpointless.inprocess.communicators.shared_backends import SharedBackends


def test_a_number_that_a_file_has_taken_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open("wb") as file:
        # The socket of that number was closed after the listing.
        monkeypatch.setattr(gloo_sockets, "_sockets", lambda: {file.fileno(): 1})
        before = len(os.listdir("/proc/self/fd"))
        assert GlooSockets(SharedBackends()).shutdown() == 0
        assert len(os.listdir("/proc/self/fd")) == before
        assert file.write(b"still open") == 10


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_process_without_free_descriptors_is_told_so_once(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[int, int]:
        raise OSError(number, os.strerror(number), "/proc/self/fd")

    monkeypatch.setattr(gloo_sockets, "_sockets", fail)
    sockets = GlooSockets(SharedBackends())
    for _ in range(3):
        with contextlib.nullcontext() if number == errno.EMFILE else pytest.raises(PermissionError):
            assert sockets.shutdown() == 0
    assert len(caplog.messages) == (1 if number == errno.EMFILE else 0)


def test_where_descriptors_are_used_up_later_sockets_are_not_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, fails = gloo_sockets._sockets, [False]

    def list_or_fail() -> dict[int, int]:
        if fails[0]:
            raise OSError(errno.EMFILE, "no descriptors")
        return listed()

    def make_group(*_: object, **__: object) -> None:
        fails[0] = True

    monkeypatch.setattr(c10d, gloo_sockets._FACTORY, make_group)
    monkeypatch.setattr(gloo_sockets, "_sockets", list_or_fail)
    noted = GlooSockets(SharedBackends())
    noted.install()
    try:
        with pytest.raises(OSError, match="no descriptors"):
            getattr(c10d, gloo_sockets._FACTORY)(4, 2, [0, 1, 2, 3], "gloo")
        fails[0] = False
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine, other = socket.create_connection(server.getsockname()), server.accept()[0]
        with mine, other:
            assert noted.shutdown() == 0
            other.sendall(b"a logger's")
            assert mine.recv(10) == b"a logger's"
    finally:
        noted.uninstall()


class Listings:
    """Stands in for torch's factory of groups, and counts how often all descriptors are listed."""

    def __init__(self) -> None:
        self.count = 0
        self.open: list[socket.socket] = []
        self._listed = gloo_sockets._sockets

    def __call__(self) -> dict[int, int]:
        self.count += 1
        return self._listed()

    def make_group(self, *_: object, **__: object) -> None:
        """Connect, as a group does."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.open += [socket.create_connection(server.getsockname()), server.accept()[0]]


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listings]:
    made = Listings()
    monkeypatch.setattr(c10d, gloo_sockets._FACTORY, made.make_group)
    monkeypatch.setattr(gloo_sockets, "_sockets", made)
    yield made
    for each in made.open:
        each.close()


def test_descriptors_are_looked_at_only_for_groups_that_connect_here(listings: Listings) -> None:
    """There are as many groups as ranks, and about as many descriptors: all of them for each would be a square."""
    noted = GlooSockets(SharedBackends())
    noted.install()
    try:
        make: Callable[..., Any] = getattr(c10d, gloo_sockets._FACTORY)
        for _ in range(50):
            make(4, None, [4, 5, 6, 7], "gloo")  # groups of others
            make(1, 0, [0], "gloo")  # groups of this rank alone
        assert listings.count == 0
        make(4, 2, [0, 1, 2, 3], "gloo")
        make(group_size=8, group_rank=0, global_ranks_in_group=[])
        assert listings.count == 4
        assert noted.shutdown() == 4
        noted.release()
    finally:
        noted.uninstall()


def test_a_group_that_is_still_made_is_cut_again_and_again_without_a_new_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cut is repeated until the main thread has left, which may take as long as the group connects."""
    counts: list[int] = []
    opened: list[socket.socket] = []
    noted = GlooSockets(SharedBackends())

    def make_group(*_: object, **__: object) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            for _connection in range(3):
                opened.extend([socket.create_connection(server.getsockname()), server.accept()[0]])
                for _again in range(5):
                    noted.shutdown()
                counts.append(len(os.listdir("/proc/self/fd")))
                assert opened[-1].recv(1) == b""

    monkeypatch.setattr(c10d, gloo_sockets._FACTORY, make_group)
    noted.install()
    try:
        before = len(os.listdir("/proc/self/fd"))
        getattr(c10d, gloo_sockets._FACTORY)(4, 2, [0, 1, 2, 3], "gloo")
        # Each of the two sockets has one duplicate; the server is closed afterwards.
        assert [count - before - 1 for count in counts] == [4, 8, 12]
        noted.release()
        assert len(os.listdir("/proc/self/fd")) == before + len(opened)
    finally:
        noted.uninstall()
        for connection in opened:
            connection.close()


def test_what_could_not_be_cut_for_want_of_a_descriptor_is_cut_later(
    listings: Listings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noted, duplicate = GlooSockets(SharedBackends()), os.dup
    left = [1]  # descriptors

    def dup_while_there_are_any(descriptor: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EMFILE, "no descriptors")
        return duplicate(descriptor)

    noted.install()
    try:
        for _ in range(2):
            getattr(c10d, gloo_sockets._FACTORY)(4, 2, [0, 1, 2, 3], "gloo")
        monkeypatch.setattr(os, "dup", dup_while_there_are_any)
        assert noted.shutdown() <= 1
        assert len(caplog.messages) == 1
        monkeypatch.setattr(os, "dup", duplicate)
        noted.shutdown()
        assert [each.recv(1) for each in listings.open] == [b""] * 4
        assert noted.shutdown() == 0
        noted.release()
    finally:
        noted.uninstall()


def test_a_group_that_shares_its_connections_opens_none(
    listings: Listings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As there are many such groups, and what is opened meanwhile, by a logger's thread, is not theirs."""
    shared = SharedBackends()
    make_group = listings.make_group

    def make(*_: object, **__: object) -> None:
        """Make a backend unless there is one, as ``gloo_connect`` does, while another thread opens a connection."""
        shared.get(lambda: make_group() or object())
        another.make_group()

    another = Listings()
    monkeypatch.setattr(c10d, gloo_sockets._FACTORY, make)
    noted = GlooSockets(shared)
    noted.install()
    shared.install()  # later, so that it is asked first
    try:
        with shared.sharing():
            factory: Callable[..., Any] = getattr(c10d, gloo_sockets._FACTORY)
            factory(4, 2, [0, 1, 2, 3], "gloo")
            first = listings.count
            for _ in range(10):
                factory(4, 2, [0, 1, 2, 3], "gloo")
        assert (first, listings.count) == (2, 2)
        assert noted.shutdown() == 4, "the connections of the first, and what was opened while it was made"
        noted.release()
    finally:
        shared.uninstall()
        noted.uninstall()
        for each in another.open:
            each.close()
