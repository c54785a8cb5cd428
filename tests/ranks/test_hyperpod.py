"""Test ranks of SageMaker HyperPod's agent, as far as a stand-in for its package and its agent can show."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hyperpod_stand_in import Agent
from tests.ranks.agent_job import SCRIPTS
from tests.waiting import wait_until

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
            [sys.executable, str(SCRIPTS / "wrapped.py"), "hyperpod", *self._args],
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


def test_an_exception_is_recovered_from_in_place_and_a_killed_rank_by_a_new_process(
    jobs: list[Job], tmp_path: Path
) -> None:
    """The other rank keeps its process through both."""
    jobs.append(job := Job(tmp_path, "raise", "die"))
    killed = job.ranks[1]
    _, err = killed.communicate(timeout=180)
    assert killed.returncode == -9, err
    reports = [message for message in job.agent.heard if message["type"] == "job_fault"]
    assert "rank 1 raised ValueError at step 3: the loss is not a number" in [each["message"] for each in reports]
    assert {report["restart_mode"] for report in reports} == {"in_process_restart"}
    wait_until(lambda: job.agent.restart_count)  # since a rank has died
    job.ranks[1] = job.spawn(1)
    (survivor, survivor_err), (newcomer, newcomer_err) = (rank.communicate(timeout=180) for rank in job.ranks)
    assert job.ranks[0].returncode == 0, survivor_err
    assert job.ranks[1].returncode == 0, newcomer_err
    assert "rank 0 done in generation 2 of 2" in survivor
    assert "rank 1 done in generation 2 of 2" in newcomer
    assert pid(survivor, "rank 0 begins") == pid(survivor, "high water")
    assert re.findall(r"high water (-?\d+)", survivor) == re.findall(r"high water (-?\d+)", newcomer)


@pytest.mark.long
def test_a_rank_0_that_was_killed_is_met_again(jobs: list[Job], tmp_path: Path) -> None:
    """The store that all meet in goes with it."""
    jobs.append(job := Job(tmp_path, "wait"))
    job.agent.wait_for("past_rcb_barrier", 2, timeout_s=180)
    job.ranks[0].kill()
    job.ranks[0].communicate(timeout=180)
    wait_until(lambda: job.agent.restart_count)  # since a rank has died
    job.ranks[0] = job.spawn(0)
    for number, rank in enumerate(job.ranks):
        out, err = rank.communicate(timeout=180)
        assert rank.returncode == 0, err
        assert f"rank {number} done in generation 1 of 1" in out
