"""Test which descriptors are taken for connections of process groups."""

import contextlib
import errno
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from checkpointless.inprocess.communicators import process_groups
from checkpointless.inprocess.communicators.process_groups import _GlooSockets
from checkpointless.inprocess.exceptions import RankShouldRestart
from tests.descriptors import descriptors


def made(noted: _GlooSockets, make_group: Callable[[], object], backend: str | None = "gloo") -> None:
    arguments = 4, 2, [0, 1, 2, 3], backend
    with noted.noting(*arguments):
        make_group()


def test_where_descriptors_are_used_up_later_sockets_are_not_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    listed, fails = process_groups._sockets, [False]

    def list_or_fail() -> dict[int, int]:
        if fails[0]:
            raise OSError(errno.EMFILE, "no descriptors")
        return listed()

    monkeypatch.setattr(process_groups, "_sockets", list_or_fail)
    noted = _GlooSockets()
    with pytest.raises(OSError, match="no descriptors"):
        made(noted, lambda: fails.__setitem__(0, True))
    fails[0] = False
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
    mine: list[tuple[socket.socket, socket.socket]] = []
    others: list[tuple[socket.socket, socket.socket]] = []

    def make_group() -> None:
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(connected).result())
        mine.append(connected_by_gloo())
        assert noted.shutdown() == 2

    made(noted, make_group, backend)
    mine.append(connected_by_gloo())  # of a library that is not the group's
    assert noted.shutdown() == 0
    assert [each.recv(1) for each in mine[0]] == [b"", b""]
    assert still_talk(*others[0])
    assert still_talk(*mine[1])
    noted.release()
    for each in mine[0]:
        each.close()


def test_a_socket_is_left_open_where_an_interruption_comes_while_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else gloo would go on with a descriptor that something else has got meanwhile."""

    def interrupted(*_: object) -> bool:
        raise RankShouldRestart

    mine, other = connected_by_gloo()
    with monkeypatch.context() as patched:
        patched.setattr(process_groups, "_option", interrupted)
        with pytest.raises(RankShouldRestart):
            process_groups._is_backends(mine.fileno(), gloo=True)
    assert still_talk(mine, other)


def test_marks_of_gloos_sockets() -> None:
    """A version of torch whose sockets are others would not be freed in an abort."""
    before, store = set(process_groups._sockets().values()), dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=60))  # type: ignore[arg-type]
            for rank in range(2)
        ]
        groups = [each.result() for each in made]
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
        assert noted.shutdown() == 0
        assert noted.shutdown(unmet=True) == 1
        assert noted.shutdown(unmet=True) == 0
        with pytest.raises(OSError, match="Invalid argument"):
            unmet.accept()
        for each in others:
            with pytest.raises(BlockingIOError):
                each.accept()


def test_the_store_is_known_by_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = connected()
    monkeypatch.setenv("MASTER_PORT", "1")
    assert _GlooSockets().shutdown() == 0
    monkeypatch.setenv("MASTER_PORT", str(mine.getpeername()[1]))
    assert _GlooSockets().shutdown() == 1
    with mine, other:
        assert mine.recv(1) == b""
