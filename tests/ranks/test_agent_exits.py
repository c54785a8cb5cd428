"""Test that a rank's process ends although something in it does not, and that nobody who works is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.agent_job import Ended, Job
from tests.ranks.test_agent_nodes import NPROC, Nodes
from tests.ranks.test_agent_signals import left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

GRACE_S = 2.0


def run(folder: Path, *arguments: str, nproc: int = 2, **options: Any) -> tuple[Ended, Job]:
    job = Job(folder, "stays.py", *arguments, nproc=nproc, exit_grace_s=GRACE_S, **options)
    return job.end(), job


def test_a_thread_of_an_earlier_entry_keeps_no_rank(tmp_path: Path) -> None:
    ended, job = run(tmp_path, "1:abandons")
    assert ended.code == 0
    assert "rank 1 ends without thread 'writer'" in job.log(1)
    assert "which an earlier entry of its block left behind" in job.log(1)
    assert left(tmp_path, "atexit") == [0, 1]


def test_a_thread_that_idles_after_the_script_is_named_and_left_and_one_that_works_is_waited_for(
    tmp_path: Path,
) -> None:
    ended, job = run(tmp_path, "1:thread", "2:works", nproc=3)
    assert ended.code == 0
    assert left(tmp_path, "worked") == [2]
    assert "idle" not in job.log(2)
    assert "rank 1 has been idle for 2 s since its script ended (--exit-grace)" in job.log(1)
    assert "it ends without thread 'uploader'" in job.log(1)
    assert "in wait_for_ever" in job.log(1)
    assert left(tmp_path, "atexit") == [0, 1, 2]


def test_a_process_that_idles_after_the_script_is_killed(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "plain", "0:child", nproc=1, fork_here=False, preload=())
    assert ended.code == 0
    assert "rank 0 has had nothing to do but end for" in ended.err


def test_code_that_holds_pythons_lock_after_the_script_is_ended_by_the_agent(tmp_path: Path) -> None:
    """Nothing of the script is cut off, so its own exit code counts."""
    ended, job = run(tmp_path, "1:lock")
    assert ended.code == 0
    assert "rank 1 has had nothing to do but end for" in ended.err
    assert "and is killed; its stacks are in " in ended.err
    assert "in hold_the_lock" in job.log(1)


def test_a_rank_that_sleeps_after_its_block_is_ended_and_fails_the_job(tmp_path: Path) -> None:
    ended, job = run(tmp_path, "1:sleeps")
    assert ended.code == 1
    assert "rank 1 has had nothing to do but end for" in ended.err
    assert "rank 1 killed by SIGKILL" in ended.err.splitlines()[-1]
    assert "stays.py" in job.log(1)


def test_a_rank_that_works_after_its_block_is_waited_for(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "1:works on")
    assert (ended.code, left(tmp_path, "worked")) == (0, [1])
    assert "killed" not in ended.err


def test_a_script_without_a_block_is_told_of_first_and_ended_late(tmp_path: Path) -> None:
    ended, job = run(tmp_path, "plain", "1:sleeps", heartbeat_timeout_s=2 * GRACE_S)
    assert ended.code == 1
    first, second, *_ = (line for line in ended.err.splitlines() if "while others ended" in line)
    assert first.startswith("rank 1 has done nothing while others ended for ")
    assert "killed" not in first
    assert " and is killed; its stacks are in " in second
    assert "stays.py" in job.log(1)


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_no_other_of_its_node_waits_for_is_ended_all_the_same(tmp_path: Path, node: int) -> None:
    """The ranks of the other node have ended."""
    stays = [f"{NPROC * node + local}:sleeps" for local in range(NPROC)]
    nodes = Nodes(tmp_path, 2, *stays, script="stays.py", exit_grace_s=GRACE_S)
    ended = nodes.end()
    assert {each.code for each in ended} == {1}
    assert f"rank {NPROC * node} has had nothing to do but end for" in ended[node].err
    assert "has had nothing to do" not in ended[1 - node].err
    assert "killed by SIGKILL" in ended[0].err
