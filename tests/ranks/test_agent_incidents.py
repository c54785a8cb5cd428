"""Test how ranks that fail, die or hang under a real agent come together again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.agent_job import Job
from tests.waiting import wait_until

pytestmark = pytest.mark.ranks


def incarnations(job: Job, generation: int) -> dict[int, int]:
    return {n["rank"]: n["incarnation"] for n in job.notes("go") if n["generation"] == generation}


def pids(job: Job, rank: int) -> set[int]:
    return {n["pid"] for n in job.notes("go", rank)}


def test_every_rank_hears_of_a_fault(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", "1:4:0:raise", nproc=4)
    ended = job.end()
    heard = job.notes("notice")
    assert {n["rank"] for n in heard} == {0, 1, 2, 3}
    assert all(n["generation"] == 0 and n["culprit"] == 1 for n in heard)
    assert all("rank 1 raised ValueError at step 4" in n["cause"] for n in heard)
    assert incarnations(job, 1) == {0: 0, 1: 0, 2: 0, 3: 0}
    assert "incident 1: rank 1 raised ValueError at step 4: the loss is not a number; recovering" in ended.err
    assert "incident 1: recovered in" in ended.err
    (told,) = [event for event in job.events("notify") if event.edge == "end"]
    assert told.fields["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGTERM", "killed by SIGTERM"),
        ("SIGSEGV", "killed by SIGSEGV"),
        ("3", "exited with code 3"),
        ("0", "exited with code 0"),
    ],
)
def test_a_rank_that_dies_is_respawned_alone(tmp_path: Path, what: str, said: str) -> None:
    job = Job(tmp_path, "steps.py", f"1:4:0:{what}")
    ended = job.end()
    assert incarnations(job, 1) == {0: 0, 1: 1, 2: 0}
    assert len(pids(job, 0)) == len(pids(job, 2)) == 1
    assert len(pids(job, 1)) == 2
    assert f"incident 1: rank 1 {said} at step 4; recovering" in ended.err
    assert [event.edge for event in job.events("respawn")] == ["begin", "end"]
    assert all(n["high_water"] >= 3 for n in job.notes("go") if n["generation"] == 1)
    assert job.log(1).count("begins") == 2


@pytest.mark.parametrize("preload", [("numpy",), ("numpy", "sets_up_cuda")], ids=["preloaded", "bare"])
def test_a_respawned_rank_is_like_its_first_process(tmp_path: Path, preload: tuple[str, ...]) -> None:
    """Where an import sets up CUDA, nothing is imported before a rank is forked."""
    job = Job(tmp_path, "traits.py", env={"STEPS": "100000"}, preload=preload)
    wait_until(lambda: job.notes("step", 1))
    first = job.notes("go", 1)[-1]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: job.notes("step", 1)[-1]["pid"] != first)
    before, after = ({**n, "pid": 0, "mono": 0} for n in job.notes("traits", 1))
    assert after == before
    drawn = job.notes("drawn")
    assert len(drawn) == 4
    assert len({n["numpy"] for n in drawn}) == len({n["python"] for n in drawn}) == 4
    job.process.send_signal(signal.SIGINT)
    ended = job.end(code=1)
    assert ended.err.splitlines()[-1] == "stopped by SIGINT"
    assert ("has initialized CUDA: nothing is preloaded" in ended.err) == (len(preload) == 2)


def test_two_faults_one_after_the_other(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", "1:3:0:SIGKILL", "0:6:1:raise")
    ended = job.end()
    assert incarnations(job, 2) == {0: 0, 1: 1, 2: 0}
    assert "incident 2: rank 0 raised ValueError at step 6" in ended.err


def test_a_hanging_rank_is_replaced_and_those_that_wait_for_it_are_not(tmp_path: Path) -> None:
    job = Job(tmp_path, "collective.py", heartbeat_timeout_s=3.0)
    ended = job.end()
    assert incarnations(job, 1) == {0: 0, 1: 1, 2: 0}
    asked = {n["rank"]: n["in_collective"] for n in job.notes("asked")}
    assert asked == {0: True, 1: False, 2: True}
    assert {n["culprit"] for n in job.notes("notice")} <= {1, None}
    assert "rank 1 made no progress for 3 s at step 4" in ended.err
    for rank in (0, 2):
        assert [n["step"] for n in job.notes("step", rank)] == list(range(1, 9))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_on_the_way_to_the_barrier_is_not_lost(tmp_path: Path, when: str) -> None:
    job = Job(tmp_path, "steps.py", "0:3:0:raise", f"1:{when}:SIGKILL", "2:before:SIGKILL")
    job.end()
    assert {n["rank"] for n in job.notes("suffers")} == {1, 2}
    last = max(n["generation"] for n in job.notes("go"))
    assert incarnations(job, last) == {0: 0, 1: 1, 2: 1}
    if when == "before":
        assert last == 1


@pytest.mark.parametrize(
    ("faults", "options", "said"),
    [
        (["1:4:0:SIGSTOP"], {"heartbeat_timeout_s": 3.0}, "rank 1 made no progress for 3 s at step 4"),
        (["1:5:0:replace"], {}, "rank 1 asked to be replaced at step 5: worn out; recovering"),
        (["0:3:0:raise", "1:before:sleep"], {"regroup_timeout_s": 3.0}, "rank 1 did not come back in time"),
    ],
    ids=["stopped", "asks", "does not come to the barrier"],
)
def test_a_rank_that_cannot_go_on_is_replaced(
    tmp_path: Path, faults: list[str], options: dict[str, Any], said: str
) -> None:
    job = Job(tmp_path, "steps.py", *faults, **options)
    ended = job.end()
    assert incarnations(job, 1) == {0: 0, 1: 1, 2: 0}
    assert f"incident 1: {said}" in ended.err
    assert "incident 2" not in ended.err


def test_a_rank_that_never_comes_to_the_barrier_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", "0:3:0:raise", "1:before:sleep", "+1:before:sleep", regroup_timeout_s=3.0)
    ended = job.end(code=1)
    assert ended.err.splitlines()[-1] == "rank 1 did not come back within 3 s, also not as a new process"
