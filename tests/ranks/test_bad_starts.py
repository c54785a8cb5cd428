"""Test jobs that fail before anything is trained: what no retry can mend ends at once, and is told once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.agent_job import Ended, Job

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
OURS = ("rank_process.py", "runpy", "wrap.py", "main_thread.py")


def start(tmp_path: Path, what: str, max_restarts: int = 0, code: int = 1) -> tuple[Ended, list[int]]:
    """Run a job, and return how it ended and how often each rank has started or entered its block."""
    job = Job(tmp_path / "run", "bad_start.py", what, str(tmp_path), max_restarts=max_restarts)
    return job.end(code=code), [len(path.read_text()) for path in sorted(tmp_path.glob("started-*"))]


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("syntax", "SyntaxError: invalid syntax"),
        ("import", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    ],
)
def test_a_script_that_cannot_be_run_ends_at_once_with_one_traceback(tmp_path: Path, what: str, error: str) -> None:
    ended, starts = start(tmp_path, what, max_restarts=3)
    assert max(starts) == 1
    assert f"cannot run the script: {error}" in ended.err.splitlines()[-1]
    assert ended.out.count("Traceback") == 1
    assert not any(name in ended.out for name in OURS), ended.out


def test_what_every_rank_raises_before_the_first_step_ends_at_once_with_one_traceback(tmp_path: Path) -> None:
    ended, starts = start(tmp_path, "same", max_restarts=3)
    assert starts == [2, 2, 2]  # each process, and its block
    assert "all 3 ranks raised ValueError before the first step: devices=4 with 3 ranks" in ended.err
    assert (ended.out + ended.err).count("Traceback") == 1
    assert not any(name in ended.err for name in OURS), ended.err


def test_what_one_rank_raises_before_the_first_step_is_tried_again(tmp_path: Path) -> None:
    ended, _ = start(tmp_path, "one", code=0)
    assert ended.out.count("done in generation 1") == 3


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_script_without_a_block_is_restarted_as_often_as_allowed(tmp_path: Path, restarts: int) -> None:
    ended, starts = start(tmp_path, "flake", max_restarts=restarts, code=1 - restarts)
    assert starts[1] == 1 + restarts
    assert ("restart 1 of 1: rank 1 exited with code 1" in ended.err) is bool(restarts)
    assert (ended.out + ended.err).count("OSError: the file system was away") == 1


def test_a_script_without_a_launcher_says_what_to_do_and_is_entered_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    script = tmp_path / "alone.py"
    script.write_text(
        "from checkpointless import HPWrapper\n\n@HPWrapper\ndef main():\n    print('entered')\n"
        "    raise ValueError('RANK expected, but not set')\n\nmain()\n"
    )
    for name in ("RANK", "SLURM_PROCID"):
        environment.pop(name, None)
    ended = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "entered\n"
    assert ended.stderr.count("start this script with `checkpointless run` or with torchrun") == 1
    assert ended.stderr.splitlines()[-1] == "ValueError: RANK expected, but not set"
    assert "AgentLostError" not in ended.stderr
