"""Test how a job under a real agent ends, with which code and last words, and that it leaves nothing."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.agent_job import Job, is_alive
from tests.waiting import wait_until

pytestmark = pytest.mark.ranks


LOSS = "the loss is not a number"


@pytest.mark.parametrize(
    ("faults", "options", "incidents", "last"),
    [
        (["1:4:*:raise"], {}, 3, f"ValueError: {LOSS}"),
        (
            ["1:4:0:SIGKILL", "1:99:0:stillborn"],
            {},
            None,
            "5 successors ended before they entered the block.*rank 1 exited with code 7 before it entered",
        ),
        (
            ["1:3:0:raise", "2:6:1:gate", "2:7:1:SIGKILL"],
            {"max_incidents": 1},
            2,
            "incident 2 is over the limit of 1: rank 2 killed by SIGKILL at step 7",
        ),
        (["0:4:0:giveup"], {}, None, "nobody holds shard 3$"),
    ],
    ids=["the-third-time-of-an-exception", "successors-always-die", "max-incidents", "a-rank-gives-up"],
)
def test_what_ends_the_job_is_its_last_word(
    tmp_path: Path, faults: list[str], options: dict[str, Any], incidents: int | None, last: str
) -> None:
    job = Job(tmp_path, "steps.py", *faults, **options)
    if options:
        wait_until(lambda: job.events("recovered"))
        (tmp_path / "gate").touch()
    ended = job.end(code=1)
    assert re.match(last, ended.err.splitlines()[-1])
    if incidents is not None:
        assert f"incident {incidents}" in ended.err
        assert f"incident {incidents + 1}" not in ended.err
    if options:
        assert "incident 1: recovered" in ended.err
    if incidents == 3:
        assert f"rank 1 raised ValueError at step 4: {LOSS}, 3 times in a row" in ended.err
        assert "steps.py" in ended.err


@pytest.mark.parametrize("fork_here", [False, True])
def test_arguments_that_are_not_utf8_reach_the_script(tmp_path: Path, fork_here: bool) -> None:
    Job(tmp_path, "arguments.py", "caf\udce9", "café", nproc=1, fork_here=fork_here).end()
    assert b"arguments caf\xe9 caf\xc3\xa9" in (tmp_path / "logs" / "rank-0.log").read_bytes()


def test_a_plain_script_ends_well(tmp_path: Path) -> None:
    job = Job(tmp_path, "plain.py", "0:late")
    ended = job.end()
    assert ended.err == ""
    for rank in range(3):
        assert f"[rank {rank}] rank {rank} of 3 begins" in ended.out


@pytest.mark.parametrize(
    ("what", "said", "line"),
    [
        ("3", "rank 1 exited with code 3", "rank 1 of 3 begins"),
        ("SIGKILL", "rank 1 killed by SIGKILL", "rank 1 of 3 begins"),
        ("raise", "rank 1 exited with code 1", "ValueError: a bug of the user's own"),
    ],
)
def test_a_plain_script_that_fails_ends_the_job_as_under_torchrun(
    tmp_path: Path, what: str, said: str, line: str
) -> None:
    job = Job(tmp_path, "plain.py", f"1:{what}", "*:wait")
    started_s = time.monotonic()
    ended = job.end(code=1)
    assert ended.err.splitlines()[-1].startswith(said)
    assert (ended.out + ended.err).count(line) == 1
    assert time.monotonic() - started_s < 50  # the others wait for 60 s


def test_a_second_interrupt_does_not_wait_for_stubborn_ranks(tmp_path: Path) -> None:
    job = Job(tmp_path, "plain.py", "*:stubborn")
    wait_until(lambda: all("waiting" in job.log(rank) for rank in range(3)))
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGINT)  # as from a terminal and from what runs the agent: one press
    presses = 1
    while job.process.poll() is None:
        time.sleep(1.5)
        job.process.send_signal(signal.SIGINT)
        presses += 1
    ended = job.end(code=1)
    assert presses > 1
    assert "before a second SIGINT came" in ended.err


@pytest.mark.parametrize(
    ("script", "what", "word", "stopped"),
    [
        ("plain.py", "*:stubborn", "waiting", False),
        ("orphan.py", "wait", "started", False),
        ("orphan.py", "wait", "started", True),
    ],
)
def test_a_killed_agent_leaves_no_process_of_ranks_and_nothing_that_they_have_started(
    tmp_path: Path, script: str, what: str, word: str, stopped: bool
) -> None:
    job = Job(tmp_path, script, what, nproc=2)
    wait_until(lambda: all(word in job.log(rank) for rank in range(2)))
    assert len(job.left()) >= 4
    if stopped:
        job.zygote().suspend()
    job.process.kill()
    job.process.communicate(timeout=180)
    wait_until(lambda: not job.left())


def test_a_killed_zygote_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    job = Job(tmp_path, "plain.py", "*:stubborn")
    wait_until(lambda: all("waiting" in job.log(rank) for rank in range(3)))
    job.zygote().kill()
    assert job.end(code=1).err == "the fork server was killed by SIGKILL\n"


def test_what_a_rank_left_running_is_gone_after_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "orphan.py", nproc=1)
    job.end()
    assert not any(is_alive(int(pid)) for pid in job.log(0).split()[:2])


def test_only_the_run_dir_is_written_and_for_a_time_a_folder_for_sockets(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    job = Job(tmp_path / "run", "steps.py", "1:4:0:SIGKILL", "2:8:1:gate")
    wait_until(lambda: any(note["step"] == 10 for note in job.notes("step", 0)))
    (private,) = short_folder.iterdir()
    assert private.name.startswith("ckpl-")
    assert len(list(private.iterdir())) == 3
    (job.run_dir / "gate").touch()
    job.end()
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    assert list(short_folder.iterdir()) == []


def test_what_is_imported_before_there_are_ranks_is_not_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's environment has a rank, as a pod or a batch script may give it one."""
    (tmp_path / "asks_for_its_rank.py").write_text("import os; print('RANK' in os.environ, os.environ['ROLE'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("ROLE", "worker")
    job = Job(tmp_path / "run", "plain.py", nproc=1, preload=("asks_for_its_rank",))
    job.end()
    assert "rank 0 of 1 begins" in job.log(0)
    assert "False worker" in (job.run_dir / "logs" / "zygote.log").read_text()


REFUSES: dict[str, Any] = {"preload": ("refuses_forks",)}
NO = "Resource temporarily unavailable"


@pytest.mark.parametrize("refused", ["4", "4-6"])
def test_a_successor_whose_fork_is_refused_is_started_again(tmp_path: Path, refused: str) -> None:
    """Two ranks have died; neither process of theirs keeps a descriptor of the other."""
    faults = ("1:4:0:SIGKILL", "2:4:0:SIGKILL", "1:7:1:SIGKILL")
    job = Job(tmp_path, "steps.py", *faults, env={"REFUSED_FORKS": refused}, **REFUSES)
    job.end()
    assert [n["step"] for n in job.notes("step", 0)] == list(range(1, 11))
    assert len(job.events("recovered")) == 2


def test_a_first_fork_that_is_refused_ends_the_job_in_a_line(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", env={"REFUSED_FORKS": "3-999999"}, **REFUSES)
    ended = job.end(code=1)
    assert ended.err.splitlines()[-1].startswith("rank 2 exited with code 71; its log: ")
    assert f"the kernel gives this rank no process ({NO}): raise the limits" in job.log(2)
    assert "hung up" not in ended.err
