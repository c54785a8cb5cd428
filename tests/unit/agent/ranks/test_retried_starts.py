"""Test what happens when the kernel refuses a process of a rank."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from checkpointless.agent.ranks import starters
from checkpointless.agent.ranks.rank_process import Script
from checkpointless.agent.ranks.retried_starts import PAUSE_S, RETRY_S, Refused, RetriedStarts
from checkpointless.agent.ranks.starters import Descriptors, Exited, FreshStarter, News, Order, Started
from checkpointless.posix import process_tree
from checkpointless.posix.process_tree import wait_for_killed
from checkpointless.wire.board import Board
from checkpointless.wire.node_messages import RankEnded, Spawn
from checkpointless.wire.rank_state import RankState
from tests.descriptors import descriptors
from tests.unit.agent.commanded_node import CommandedNode


class Kernel:
    """Refuses processes as the test says.

    Attributes:
        number: the error; 0: none.
        started: which ranks it has given a process.
        told: what was told of refusals.
        now_s: the time.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.started: list[int] = []
        self.told: list[Refused] = []
        self.now_s = 100.0
        self.starts = RetriedStarts(self.told.append, lambda: self.now_s)

    def begin(self, rank: int) -> list[int]:
        """Have a rank started, and return descriptors that it needs."""
        descriptors = [os.dup(1), os.dup(1)]

        def attempt() -> None:
            if self.number:
                raise OSError(self.number, os.strerror(self.number))
            self.started.append(rank)

        self.starts.begin(rank, 7, attempt, tuple(descriptors))
        return descriptors


def are_open(descriptors: list[int]) -> bool:
    found = [Path(f"/proc/self/fd/{each}").exists() for each in descriptors]
    assert len(set(found)) == 1
    return found[0]


def test_a_start_that_is_refused_for_a_moment_is_made() -> None:
    kernel = Kernel(errno.EAGAIN)
    assert kernel.starts.pause_s is None
    descriptors = kernel.begin(3)
    assert kernel.told == [Refused(3, 7, "Resource temporarily unavailable", is_final=False)]
    assert kernel.starts.pause_s == pytest.approx(PAUSE_S)
    assert kernel.starts.descriptors() == descriptors
    kernel.starts.go_on()  # too early
    kernel.now_s += PAUSE_S
    kernel.starts.go_on()
    assert (kernel.started, len(kernel.told)) == ([], 1)  # it is told once
    kernel.number = 0
    kernel.starts.go_on()
    assert kernel.started == []
    kernel.now_s += PAUSE_S
    kernel.starts.go_on()
    assert (kernel.started, len(kernel.told)) == ([3], 1)
    assert kernel.starts.pause_s is None
    assert not are_open(descriptors)


@pytest.mark.parametrize(
    ("number", "word"), [(errno.EAGAIN, "pids.max"), (errno.ENOMEM, "memory.max"), (errno.EMFILE, "ulimit -n")]
)
def test_a_start_that_stays_refused_is_given_up_with_what_to_do(number: int, word: str) -> None:
    kernel = Kernel(number)
    descriptors = kernel.begin(3)
    while len(kernel.told) == 1:
        kernel.now_s += PAUSE_S
        kernel.starts.go_on()
    assert kernel.now_s == pytest.approx(100 + RETRY_S, abs=2 * PAUSE_S)
    assert kernel.told[1].is_final
    assert kernel.told[1].why.startswith(f"{os.strerror(number)}, for 30 s; ")
    assert word in kernel.told[1].why
    assert not are_open(descriptors)
    assert kernel.starts.pause_s is None


def test_what_does_not_pass_by_itself_is_not_waited_for() -> None:
    kernel = Kernel(errno.EACCES)
    assert not are_open(kernel.begin(3))
    assert kernel.told == [Refused(3, 7, "Permission denied", is_final=True)]


def test_a_start_that_waits_can_be_cancelled() -> None:
    kernel = Kernel(errno.ENOMEM)
    first, second = kernel.begin(3), kernel.begin(4)
    kernel.starts.cancel(3, 6)
    assert are_open(first)
    kernel.starts.cancel(3, 7)
    assert kernel.told[2:] == [Refused(3, 7, "", is_final=True)]
    assert (are_open(first), are_open(second)) == (False, True)
    kernel.starts.close()
    assert not are_open(second)


# --- interpreters


@pytest.fixture
def fresh(tmp_path: Path) -> FreshStarter:
    (tmp_path / "train.py").write_text("print('trained')")
    return FreshStarter(Script(str(tmp_path / "train.py")), None, None)


def refusing(times: int) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a ``Popen`` that is refused so many times."""
    popen, left = subprocess.Popen, [times]

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return popen(*args, **options)

    return start


def test_an_interpreter_that_is_refused_for_a_moment_is_started(
    tmp_path: Path, fresh: FreshStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starters.subprocess, "Popen", refusing(2))
    with (tmp_path / "rank.log").open("wb") as log, open(os.devnull) as agent, closing(Board.create(0)) as board:
        fresh.start(Order(0, 1, {"RANK": "0"}), Descriptors(log.fileno(), agent.fileno(), board.fd))
        agent.close()  # what was given is only borrowed
        log.close()
        found: list[News] = []
        deadline_s = time.monotonic() + 60
        while not any(isinstance(each, Exited) for each in found) and time.monotonic() < deadline_s:
            found += fresh.news()
            time.sleep(0.02)
    fresh.close()
    assert [type(each) for each in found] == [Refused, Started, Exited]
    assert found[0] == Refused(0, 1, "Cannot allocate memory", is_final=False)
    assert (tmp_path / "rank.log").read_text() == "trained\n"


# --- the agent


def test_the_agent_tells_of_a_refusal_and_reports_a_start_that_is_given_up(tmp_path: Path) -> None:
    node = CommandedNode(tmp_path)
    node.tick()
    node.agent.obey(Spawn(0, 0, 0, "", {}))
    node.starter.coming = [Refused(0, 0, "no", is_final=False)]
    node.said.clear()
    node.tick()
    assert node.printed == ["rank 0 could not be started: no; it is tried again for 30 s"]
    assert node.said == []
    node.starter.coming = [Refused(0, 0, "no, for 30 s; do this", is_final=True)]
    node.tick()
    (ended,) = node.said
    assert isinstance(ended, RankEnded)
    assert (ended.rank, ended.code, ended.was_started, ended.refusal) == (0, 1, True, "no, for 30 s; do this")
    assert node.agent.alive() == []
    node.agent.close()


def test_a_rank_that_waits_for_its_process_is_killed_by_cancelling_it(tmp_path: Path) -> None:
    node = CommandedNode(tmp_path)
    node.tick()
    node.agent.obey(Spawn(0, 0, 0, "", {}))
    node.starter.coming = [Refused(0, 0, "no", is_final=False)]
    node.tick()
    node.agent.obey(Spawn(0, 1, 1, "1", {}))  # the living process is killed first
    assert node.starter.cancelled == [(0, 0)]
    node.starter.coming = [Refused(0, 0, "", is_final=True)]
    node.tick()
    node.tick()
    rank = node.agent.ranks[0]
    assert (rank.state, rank.incarnation, rank.pid) == (RankState.STARTING, 1, 1000)
    node.agent.close()


# --- processes that a kill does not end


def test_a_child_that_does_not_end_in_time_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert wait_for_killed(process, 0.1) is None
        assert f"process {process.pid} was killed, but has not ended within 0.1 s" in caplog.text
        process.kill()
        assert wait_for_killed(process, 60) == -9


def test_an_interpreter_that_the_kernel_holds_does_not_keep_the_rest_from_being_closed(
    tmp_path: Path, fresh: FreshStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a disk or a driver: SIGKILL takes effect when it comes back."""
    before = descriptors()
    with open(os.devnull, "r+b") as null, closing(Board.create(0)) as board:
        for rank in range(2):
            fresh.start(Order(rank, 0, {"RANK": str(rank)}), Descriptors(null.fileno(), null.fileno(), board.fd))
    held = [process for _, process, _ in fresh._processes.values()]
    waits: list[float] = []

    def wait(timeout: float) -> int:
        waits.append(timeout)
        raise subprocess.TimeoutExpired("held", timeout)

    for each in held:
        monkeypatch.setattr(each, "wait", wait)
    fresh.close()
    assert len(waits) == 2
    assert descriptors() <= before
    monkeypatch.undo()
    assert [each.wait(60) for each in held] == [-9, -9]
    assert process_tree.wait_for_killed(held[0], 1) == -9
