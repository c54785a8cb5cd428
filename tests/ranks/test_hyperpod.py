"""Test ranks of SageMaker HyperPod's agent, as far as a stand-in for its package and its agent can show."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hyperpod_stand_in import Agent
from tests.ranks.agent_job import SCRIPTS

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


class Job:
    """Runs two ranks and a stand-in for their agent; a test spawns a new process for a rank that has died."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.agent = Agent(folder / "agent", world_size=2)
        self._args = args
        self.ranks = [self.spawn(rank) for rank in range(2)]

    def spawn(self, rank: int) -> "subprocess.Popen[str]":
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, str(SCRIPTS / "hyperpod_wrapped.py"), *self._args],
            env={**os.environ, "PYTHONPATH": path, **self.agent.environment(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
        self.agent.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


def pid(out: str, after: str) -> str:
    found = re.search(rf"{after}.* pid (\d+)", out)
    assert found, out
    return found.group(1)


def test_an_exception_is_recovered_from_in_the_same_processes(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(job := Job(tmp_path, "raise"))
    for number, rank in enumerate(job.ranks):
        out, err = rank.communicate(timeout=90)
        assert rank.returncode == 0, err
        assert f"rank {number} done in generation 1 of 1" in out
        assert pid(out, f"rank {number} begins") == pid(out, "high water 2")
    reports = [message for message in job.agent.heard if message["type"] == "job_fault"]
    assert "rank 1 raised ValueError at step 3: the loss is not a number" in [each["message"] for each in reports]
    assert {report["restart_mode"] for report in reports} == {"in_process_restart"}
    assert job.agent.count("past_rcb_barrier") == 4


def test_a_killed_rank_comes_back_and_the_other_keeps_its_process(jobs: list[Job], tmp_path: Path) -> None:
    jobs.append(job := Job(tmp_path, "die"))
    killed = job.ranks[1]
    _, err = killed.communicate(timeout=60)
    assert killed.returncode == -9, err
    by_s = time.monotonic() + 10
    while job.agent.restart_count == 0:
        assert time.monotonic() < by_s
        time.sleep(0.01)
    job.ranks[1] = job.spawn(1)
    survivor, survivor_err = job.ranks[0].communicate(timeout=90)
    newcomer, newcomer_err = job.ranks[1].communicate(timeout=90)
    assert job.ranks[0].returncode == 0, survivor_err
    assert job.ranks[1].returncode == 0, newcomer_err
    assert "rank 0 done in generation 1 of 1" in survivor
    assert "rank 1 done in generation 1 of 1" in newcomer
    assert pid(survivor, "rank 0 begins") == pid(survivor, "high water")
    assert re.findall(r"high water (-?\d+)", survivor) == re.findall(r"high water (-?\d+)", newcomer)


@pytest.mark.long
def test_a_rank_0_that_was_killed_is_met_again(jobs: list[Job], tmp_path: Path) -> None:
    """The store that all meet in goes with it."""
    jobs.append(job := Job(tmp_path, "wait"))
    job.agent.wait_for("past_rcb_barrier", 2, timeout_s=60)
    job.ranks[0].kill()
    job.ranks[0].communicate(timeout=60)
    by_s = time.monotonic() + 10
    while job.agent.restart_count == 0:
        assert time.monotonic() < by_s
        time.sleep(0.01)
    job.ranks[0] = job.spawn(0)
    for number, rank in enumerate(job.ranks):
        out, err = rank.communicate(timeout=90)
        assert rank.returncode == 0, err
        assert f"rank {number} done in generation 1 of 1" in out
