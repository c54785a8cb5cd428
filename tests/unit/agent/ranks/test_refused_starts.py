"""Test what happens when the kernel refuses a process of a rank."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent.ranks import starters
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.launcher.agent.ranks.starters import Descriptors, FreshStarter, Order, Refused
from checkpointless.launcher.protocol.board import Board
from checkpointless.launcher.protocol.node_messages import RankEnded, Spawn
from checkpointless.system import process_tree
from checkpointless.system.process_tree import wait_for_killed
from tests.descriptors import descriptors
from tests.unit.agent.commanded_node import CommandedNode

# --- interpreters


@pytest.fixture
def fresh(tmp_path: Path) -> FreshStarter:
    (tmp_path / "train.py").write_text("print('trained')")
    return FreshStarter(Script(str(tmp_path / "train.py")), None, None)


@pytest.mark.parametrize(
    ("number", "what_to_do"),
    [(errno.EAGAIN, "pids.max"), (errno.ENOMEM, "memory.max"), (errno.EMFILE, "ulimit -n"), (errno.EACCES, "")],
)
def test_an_interpreter_that_is_refused_is_reported_with_what_to_do(
    fresh: FreshStarter, monkeypatch: pytest.MonkeyPatch, number: int, what_to_do: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(starters.subprocess, "Popen", refuse)
    with open(os.devnull, "r+b") as null, closing(Board.create(0)) as board:
        fresh.start(Order(3, 7, {}), Descriptors(null.fileno(), null.fileno(), board.fd))
    (refused,) = fresh.news()
    assert isinstance(refused, Refused)
    assert (refused.rank, refused.incarnation) == (3, 7)
    assert refused.why.startswith(os.strerror(number))
    assert what_to_do in refused.why
    fresh.close()


# --- the agent


def test_the_agent_reports_a_start_that_is_refused(tmp_path: Path) -> None:
    node = CommandedNode(tmp_path)
    node.tick()
    node.agent.obey(Spawn(0, 0, 0, "", {}))
    node.starter.coming = [Refused(0, 0, "no; do this")]
    node.said.clear()
    node.tick()
    (ended,) = node.said
    assert isinstance(ended, RankEnded)
    assert (ended.rank, ended.code, ended.was_started, ended.refusal) == (0, 1, True, "no; do this")
    assert node.agent.alive() == []
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
