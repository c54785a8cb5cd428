"""Test that a rank's process ends although something in it does not, and that nobody who works is cut off."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.agent_job import Ended, Job
from tests.ranks.test_agent_nodes import NPROC, Nodes
from tests.ranks.test_agent_signals import left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

GRACE_S = 2.0


def run(folder: Path, *arguments: str, nproc: int = 2, code: int = 0, **options: Any) -> tuple[Ended, Job]:
    job = Job(folder, "stays.py", *arguments, nproc=nproc, exit_grace_s=GRACE_S, **options)
    return job.end(code=code), job


def test_a_thread_that_idles_after_the_script_is_ended_by_the_agent_and_one_that_works_is_waited_for(
    tmp_path: Path,
) -> None:
    """So is code that holds Python's lock; the script's own exit code counts. What an earlier entry of the block
    has left behind keeps nobody.
    """
    ended, job = run(tmp_path, "0:abandons", "1:thread", "2:works", "3:lock", nproc=4)
    assert (left(tmp_path, "worked"), left(tmp_path, "atexit")) == ([2], [0, 2])
    for rank, where in ((1, "in wait_for_ever"), (3, "in hold_the_lock")):
        assert f"rank {rank} has had nothing to do but end for" in ended.err
        assert where in job.log(rank)
    assert "rank 0 has had nothing" not in ended.err
    assert "and is killed; its stacks are in " in ended.err


def test_a_process_that_idles_after_the_script_is_killed(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "plain", "0:child", nproc=1, fork_here=False, preload=())
    assert "rank 0 has had nothing to do but end for" in ended.err


def test_a_rank_that_sleeps_after_its_block_is_ended_and_fails_the_job(tmp_path: Path) -> None:
    ended, job = run(tmp_path, "1:sleeps", code=1)
    assert "rank 1 has had nothing to do but end for" in ended.err
    assert "rank 1 killed by SIGKILL" in ended.err.splitlines()[-1]
    assert "stays.py" in job.log(1)


def test_a_rank_that_works_after_its_block_is_waited_for(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, "1:works on")
    assert left(tmp_path, "worked") == [1]
    assert "killed" not in ended.err


def test_a_script_without_a_block_is_ended_late(tmp_path: Path) -> None:
    ended, job = run(tmp_path, "plain", "1:sleeps", code=1, heartbeat_timeout_s=2 * GRACE_S)
    assert "rank 1 has done nothing while others ended for " in ended.err
    assert "stays.py" in job.log(1)


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_no_other_of_its_node_waits_for_is_ended_all_the_same(tmp_path: Path, node: int) -> None:
    """The ranks of the other node have ended."""
    stays = [f"{NPROC * node + local}:sleeps" for local in range(NPROC)]
    nodes = Nodes(tmp_path, 2, *stays, script="stays.py", exit_grace_s=GRACE_S)
    ended = nodes.end(code=1)
    assert f"rank {NPROC * node} has had nothing to do but end for" in ended[node].err
    assert "has had nothing to do" not in ended[1 - node].err
    assert "killed by SIGKILL" in ended[0].err
