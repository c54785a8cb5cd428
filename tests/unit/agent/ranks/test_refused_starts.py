"""Test what happens when the kernel refuses a process of a rank."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointless.launcher.agent.ranks.fork_server import Refused
from checkpointless.launcher.protocol.node_messages import RankEnded, Spawn
from checkpointless.system.process_tree import wait_for_killed
from tests.unit.agent.commanded_node import CommandedNode


@pytest.mark.parametrize(
    ("number", "what_to_do"),
    [(errno.EAGAIN, "pids.max"), (errno.ENOMEM, "memory.max"), (errno.EMFILE, "ulimit -n"), (errno.EACCES, "")],
)
def test_a_process_that_is_refused_is_reported_with_what_to_do(number: int, what_to_do: str) -> None:
    refused = Refused.by(number, 3, 7)
    assert (refused.rank, refused.incarnation) == (3, 7)
    assert refused.why.startswith(os.strerror(number))
    assert what_to_do in refused.why


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
        assert f"process {process.pid} did not exit within 0.1 s after SIGKILL" in caplog.text
        process.kill()
        assert wait_for_killed(process, 60) == -9
