"""Test which descriptors are taken for connections of process groups."""

import contextlib
import errno
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from checkpointless.inprocess.communicators import process_groups
from checkpointless.inprocess.communicators.process_groups import _GlooSockets
from tests.descriptors import descriptors


def made(noted: _GlooSockets, make_group: Callable[[], object], backend: str | None = "gloo") -> None:
    arguments = 4, 2, [0, 1, 2, 3], backend
    with noted.noting(*arguments):
        make_group()


def test_where_descriptors_are_used_up_later_sockets_are_not_the_groups() -> None:
    noted, listing = _GlooSockets(), Mock(side_effect=process_groups._sockets)
    used_up = OSError(errno.EMFILE, "no descriptors")
    with patch.object(process_groups, "_sockets", listing), pytest.raises(OSError, match="no descriptors"):
        made(noted, lambda: listing.configure_mock(side_effect=used_up))
    mine, other = connected()
    assert noted.shutdown() == 0
    assert still_talk(mine, other)


def connected(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    with socket.create_server((address, 0)) as server:
        return socket.create_connection(server.getsockname()[:2]), server.accept()[0]


def connected_by_gloo() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection with the marks that gloo's have (``test_marks_of_gloos_sockets``)."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.closing(socket.socket()) as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mine.connect(server.getsockname())
        other = server.accept()[0]
        for each in (mine, other):
            each.set_inheritable(True)
        return socket.socket(fileno=mine.detach()), other


def still_talk(mine: socket.socket, other: socket.socket) -> bool:
    with mine, other:
        other.sendall(b"a logger's")
        mine.settimeout(60)
        return mine.recv(10) == b"a logger's"


def test_a_group_that_is_still_made_is_cut_again_and_again_without_a_new_descriptor() -> None:
    """The cut is repeated until the main thread has left, which may take as long as the group connects."""
    counts: list[int] = []
    opened: list[socket.socket] = []
    noted = _GlooSockets()

    def make_group() -> None:
        for _connection in range(3):
            opened.extend(connected_by_gloo())
            for _again in range(5):
                noted.shutdown()
            counts.append(len(descriptors() - before))
            assert opened[-1].recv(1) == b""

    before = descriptors()
    made(noted, make_group)
    assert counts == [4, 8, 12], "each of the two sockets has one duplicate"
    noted.release()
    assert len(descriptors() - before) == len(opened)
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:nccl", None])
def test_what_other_threads_open_while_a_group_is_made_is_left_alone(backend: str | None) -> None:
    """As a logger that sends metrics, or a server that shows them."""
    noted = _GlooSockets()
    mine: list[socket.socket] = []
    others: list[tuple[socket.socket, socket.socket]] = []

    def make_group() -> None:
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(connected).result())
        mine.extend(connected_by_gloo())
        assert noted.shutdown() == 2

    made(noted, make_group, backend)
    others.append(connected_by_gloo())  # of a library that is not the group's
    assert noted.shutdown() == 0
    assert [each.recv(1) for each in mine] == [b"", b""]
    assert [still_talk(*each) for each in others] == [True, True]
    noted.release()
    for each in mine:
        each.close()


def test_a_socket_is_left_open_where_an_interruption_comes_while_it_is_looked_at() -> None:
    """Else gloo would go on with a descriptor that something else has got meanwhile."""
    mine, other = connected_by_gloo()
    with patch.object(process_groups, "_option", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        process_groups._is_backends(mine.fileno(), gloo=True)
    assert still_talk(mine, other)


def test_marks_of_gloos_sockets() -> None:
    """A version of torch whose sockets are others would not be freed in an abort."""
    before, store = set(process_groups._sockets().values()), dist.HashStore()
    gloo, limit = dist.ProcessGroupGloo, timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: gloo(store, rank, 2, limit), range(2)))  # type: ignore[arg-type]
    present = process_groups._sockets()
    opened = {inode for inode in present.values() if inode not in before}
    assert len(opened) == 4, "two that listen, and both ends of a connection"
    assert process_groups._opened(present, before, gloo=True) == opened
    del groups


def listening(*, on_exec: bool = True, reuse: bool = False) -> socket.socket:
    made = socket.socket()
    made.set_inheritable(on_exec)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    made.bind(("127.0.0.1", 0))
    made.listen()
    made.setblocking(False)
    return made


def test_only_a_server_of_nccls_that_nobody_has_met_is_shut_down() -> None:
    """The others are Python's, gloo's, and one of a communicator that is made."""
    unmet, met = listening(), listening()
    others = [met, listening(on_exec=False), listening(reuse=True)]
    with contextlib.ExitStack() as stack:
        for each in (unmet, *others):
            stack.enter_context(each)
        stack.enter_context(socket.create_connection(met.getsockname()))
        met.setblocking(True)
        stack.enter_context(met.accept()[0])
        met.setblocking(False)
        noted = _GlooSockets()
        assert [noted.shutdown(unmet=asked) for asked in (False, True, True)] == [0, 1, 0]
        with pytest.raises(OSError, match="Invalid argument"):
            unmet.accept()
        for each in others:
            with pytest.raises(BlockingIOError):
                each.accept()


def test_the_store_is_known_by_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = connected()
    for port, cut in ((1, 0), (mine.getpeername()[1], 1)):
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert _GlooSockets().shutdown() == cut
    with mine, other:
        assert mine.recv(1) == b""
