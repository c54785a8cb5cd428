"""Test how standbys are kept, and which of them gets the place of a rank; each is a real process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from checkpointless.agent.ranks.standbys import pool as pools
from checkpointless.agent.ranks.standbys.place import MAX_REQUEST_BYTES, READY, SPOILED, say, wait_for_place
from checkpointless.agent.ranks.standbys.pool import Fate, StandbyNews, StandbyPool
from checkpointless.posix.process_tree import ProcessTree


class Pool:
    """A pool whose standbys do what the test says.

    Attributes:
        told: what the pool has told.
    """

    def __init__(self) -> None:
        self.told: list[StandbyNews] = []
        self.pool = StandbyPool(self.told.append)

    def add(self, function: Callable[[socket.socket], None]) -> int:
        """Add a child that runs ``function``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                ours.close()
                function(theirs)
            finally:
                os._exit(1)
        theirs.close()
        self.pool.add(pid, ours, ProcessTree(pid, None))
        return pid

    def hear_until(self, count: int) -> None:
        """Hear the standbys until so much was told."""
        deadline = time.monotonic() + 20
        while len(self.told) < count:
            assert time.monotonic() < deadline
            self.pool.hear()
            time.sleep(0.005)

    def reap(self, pid: int) -> StandbyNews:
        """Wait for a standby, and return what is told of it last."""
        _, status = os.waitpid(pid, 0)
        self.pool.ended(pid, os.waitstatus_to_exitcode(status))
        return self.told[-1]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    for pid in made.pool.pids():
        made.pool.kill(pid, "the test is over")
        made.reap(pid)


def good(connection: socket.socket) -> None:
    """Wait, and write into the log what came."""
    place = wait_for_place(connection)
    os.write(place.log, f"{place.env['RANK']} {place.agent != place.board}".encode())
    os._exit(0)


def deaf(connection: socket.socket) -> None:
    say(connection, READY, private_bytes=0)
    time.sleep(60)


def mute(connection: socket.socket) -> None:
    time.sleep(60)


def hasty(connection: socket.socket) -> None:
    say(connection, READY, private_bytes=0)
    connection.close()
    time.sleep(60)


def spoiled(connection: socket.socket) -> None:
    say(connection, SPOILED, name="sets_up_cuda")
    os._exit(0)


def give(pool: Pool, env: dict[str, str] | None = None) -> tuple[int | None, str]:
    """Give a place away; return who got it, and what that process wrote into the log."""
    read, write = os.pipe()
    taken = pool.pool.take(env or {"RANK": "5"}, (write, write, write))
    os.close(write)
    with os.fdopen(read) as log:
        if taken is None:
            return None, log.read()
        os.waitpid(taken.pid, 0)
        return taken.pid, log.read()


def test_a_standby_gets_environment_and_descriptors(pool: Pool) -> None:
    pid = pool.add(good)
    pool.hear_until(1)
    assert [(news.pid, news.fate) for news in pool.told] == [(pid, Fate.READY)]
    assert pool.told[0].private_bytes > 0
    assert StandbyNews.from_json(pool.told[0].to_json()) == pool.told[0]
    assert give(pool, {"RANK": "5", "LARGE": "x" * MAX_REQUEST_BYTES}) == (None, "")
    assert give(pool, {"RANK": "5", "LARGE": "x" * 100_000}) == (pid, "5 True")
    assert (pool.pool.count(), pid in pool.pool) == (0, False)


def test_there_is_none_before_it_is_ready(pool: Pool) -> None:
    pid = pool.add(mute)
    assert give(pool) == (None, "")
    assert pool.pool.count() == 1
    pool.pool.kill_older_than(60)
    assert pool.pool.count() == 1
    pool.pool.kill_older_than(0)
    assert pool.pool.count() == 0
    assert pool.reap(pid).why == "it was not ready within 0 s"


def test_one_that_does_not_answer_is_killed_and_costs_half_a_second(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "ANSWER_S", 0.2)
    pids = [pool.add(deaf), pool.add(deaf)]
    pool.hear_until(2)
    began_s = time.monotonic()
    assert give(pool) == (None, "")
    assert 0.15 < time.monotonic() - began_s < 2
    assert pool.pool.count() == 1
    lost = pool.reap(pids[0])
    assert (lost.pid, lost.fate, lost.why) == (pids[0], Fate.LOST, "it did not answer within 0.2 s")


def test_the_next_is_asked_if_one_is_stopped_or_has_hung_up(pool: Pool) -> None:
    pids = [pool.add(good), pool.add(hasty), pool.add(good)]
    pool.hear_until(3)
    os.kill(pids[0], signal.SIGSTOP)
    os.waitid(os.P_PID, pids[0], os.WSTOPPED)
    assert give(pool) == (pids[2], "5 True")
    assert pool.reap(pids[0]).why == "it was stopped"


def test_one_that_was_killed_is_lost(pool: Pool) -> None:
    pid = pool.add(good)
    pool.hear_until(1)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        assert time.monotonic() < deadline
    assert give(pool) == (None, "")
    lost = pool.reap(pid)
    assert (lost.fate, lost.why) == (Fate.LOST, "it was killed by SIGKILL")


def test_one_that_is_spoiled_is_not_lost(pool: Pool) -> None:
    pid = pool.add(spoiled)
    news = pool.reap(pid)
    assert (news.fate, news.why) == (Fate.SPOILED, "sets_up_cuda")
    assert len(pool.told) == 1


def test_a_standby_ends_when_nobody_keeps_it(pool: Pool) -> None:
    pid = pool.add(good)
    pool.hear_until(1)
    (connection,) = pool.pool.sockets()
    connection.shutdown(socket.SHUT_RDWR)
    assert pool.reap(pid).why == "it exited with code 0"
