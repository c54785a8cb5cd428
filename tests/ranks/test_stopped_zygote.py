"""A fork server that does nothing any more is noticed, and costs no request before that."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checkpointless.launcher.agent.ranks import zygote
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.launcher.agent.ranks.zygote import ANSWER_LIMIT_S, ForkServerLostError, Ready, Started, _Exited
from checkpointless.launcher.protocol.board import Board
from tests.ranks.agent_job import SCRIPTS, is_alive
from tests.waiting import wait_until

pytestmark = pytest.mark.ranks


class Node:
    """Starts ranks by a fork server of its own."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0  # it stands still unless it is told otherwise
        script = Script(str(SCRIPTS / "orphan.py"), ("wait",))
        self._log = folder / "log"
        self.starter = zygote.ForkServer(
            script, preload=(), cpu=False, env={}, log=2, folder=None, clock=lambda: self.now_s
        )
        self.process = psutil.Process(self.starter.process.pid)
        self.news: list[object] = []
        self.hear(Ready)

    def stop(self) -> None:
        self.process.suspend()
        wait_until(lambda: self.process.status() == psutil.STATUS_STOPPED)

    def hear(self, kind: type) -> None:
        def came() -> bool:
            self.news += self.starter.news()
            return any(isinstance(each, kind) for each in self.news)

        wait_until(came)

    def start(self) -> int:
        board, (ours, theirs) = Board.create(0), socket.socketpair()
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        env = {"RANK": "0", "WORLD_SIZE": "1"}
        self.starter.start(zygote.Start(0, 0, env), log, theirs.fileno(), board.fd)
        os.close(log)
        board.close()
        for end in (ours, theirs):
            end.close()
        self.hear(Started)
        (started,) = [each for each in self.news if isinstance(each, Started)]
        wait_until(lambda: "started" in self._log.read_text())
        return started.pid


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.starter.close()
    assert not is_alive(node.process.pid)


def test_one_that_is_stopped_is_killed_with_all_ranks_after_its_limit(node: Node) -> None:
    pid = node.start()
    family = node.process.children(recursive=True)
    assert len(family) == 3
    node.stop()
    node.starter.signal(pid, 9)
    node.now_s += ANSWER_LIMIT_S
    assert node.starter.news() == []
    node.now_s += 1
    with pytest.raises(ForkServerLostError, match=r"has not answered for 20 s \(stopped by a signal\)"):
        node.starter.news()
    wait_until(lambda: not any(is_alive(each.pid) for each in family))


def test_what_it_cannot_take_now_is_not_lost(node: Node) -> None:
    pid = node.start()
    node.stop()
    for _ in range(2000):  # more than its socket holds
        node.starter.signal(pid, 0)
    node.starter.signal(pid, 9)
    node.process.resume()
    node.hear(_Exited)


def test_it_is_asked_whether_it_lives_and_not_blamed_for_a_pause_without_requests(node: Node) -> None:
    node.now_s += 10 * ANSWER_LIMIT_S
    assert node.starter.news() == []
    node.stop()
    for _ in range(3):
        node.starter.ask()
    node.now_s += ANSWER_LIMIT_S + 1
    with pytest.raises(ForkServerLostError):
        node.starter.news()
