"""Check that an interruption of the main thread does not keep pipes and files from being closed."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize, close_fds  # type: ignore[attr-defined]

import pytest

from checkpointless.inprocess import fault_responder
from checkpointless.inprocess.exceptions import RankShouldRestart
from checkpointless.inprocess.fault_responder import MainThread


class Owner:
    """Can be referred to weakly."""


def leave_while(body: Callable[[], object], limit_s: float = 20, since: Callable[[], bool] = lambda: True) -> None:
    """Have this thread, in a block, do ``body``, and be interrupted from ``since`` on until it has left."""
    main, began = MainThread(), threading.Event()

    def interrupt() -> None:
        began.wait()
        while not since():
            time.sleep(0.005)
        main.interrupt_until_left(limit_s, lambda _: None)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()

    def block() -> None:
        began.set()
        body()
        while True:
            time.sleep(0.005)

    with pytest.raises(RankShouldRestart):
        main.run(block)
    main.close()
    interrupter.join(60)


def slow_to_close() -> tuple[int, socket.socket]:
    """Return a connection and its other end; nobody reads what was sent, so its ``close`` takes a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(65536))
    sender.setblocking(True)
    return sender.detach(), receiver


def is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def test_both_pipes_of_a_worker_are_closed() -> None:
    first, receiver = slow_to_close()
    second, writer = os.pipe()
    owners = [Owner()]
    Finalize(owners[0], close_fds, (first, second))  # a process of multiprocessing does the same
    with receiver:
        leave_while(owners.clear)
    os.close(writer)
    assert not is_open(first)
    assert not is_open(second)


def test_a_destructor_ends_and_is_interrupted_afterwards() -> None:
    ended = []

    class Slow:
        def __del__(self) -> None:
            for _ in range(40):
                time.sleep(0.005)
            ended.append(True)

    slow = [Slow()]
    leave_while(slow.clear)
    assert ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_destructor_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_responder, "_CLEANING_S", 0.2)

    class Endless:
        def __del__(self) -> None:
            while True:
                time.sleep(0.005)

    endless = [Endless()]
    leave_while(endless.clear)
