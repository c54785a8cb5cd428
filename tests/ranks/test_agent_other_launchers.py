"""Test ranks of torchrun, srun or no launcher: exceptions are recovered from in place, the rest ends the job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.telemetry.events import read_events
from tests.ports import free_port
from tests.ranks.agent_job import SCRIPTS

pytestmark = pytest.mark.ranks

WRAPPED = str(SCRIPTS / "wrapped.py")
NPROC = 2  # each rank imports torch for itself


def torchrun(*args: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NPROC), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env={**os.environ, **environment})


def pids(out: str, what: str) -> set[str]:
    return set(re.findall(rf"rank (\d) {what}.*? pid (\d+)", out))


def test_an_exception_under_torchrun_is_recovered_from_in_the_same_processes(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "1"
    ended = torchrun(WRAPPED, CHECKPOINTLESS_RUN_DIR=str(run_dir))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done in generation 1") == NPROC
    assert pids(ended.stdout, "begins") == pids(ended.stdout, "done in generation 1")
    assert ended.stderr.count("this launcher does not respawn ranks") == 1
    assert "not recorded" not in ended.stderr
    (incident,) = summarize(read_events(run_dir))
    assert (incident.cause, incident.culprit) == ("rank 1 raised ValueError at step 3: the loss is not a number", 1)
    assert incident.how == "exception"


def test_a_bug_under_torchrun_ends_the_job_with_it() -> None:
    ended = torchrun(WRAPPED, "always")
    assert ended.returncode == 1
    assert "done" not in ended.stdout
    assert "3 times in a row with no step committed in between" in ended.stderr
    assert "ValueError: the loss is not a number" in ended.stderr


@pytest.mark.long
def test_a_rank_that_needs_a_new_process_under_torchrun_ends_the_job() -> None:
    ended = torchrun(WRAPPED, "replace")
    assert ended.returncode == 1
    assert "done" not in ended.stdout


def test_ranks_without_a_store_of_the_launcher_meet_at_rank_0(tmp_path: Path) -> None:
    """A run directory that cannot be made costs nothing but the events."""
    (tmp_path / "file").touch()
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, WRAPPED],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NPROC),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "CHECKPOINTLESS_RUN_DIR": str(tmp_path / "file" / "1"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NPROC)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=180)
        assert rank.returncode == 0, err
        assert "done in generation 1" in out
        assert "cannot be made, so events are not recorded" in err
