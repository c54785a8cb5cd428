"""Test what the engine owes a block, whatever parts of one's own it is given and however it ends."""

import re
from pathlib import Path

import pytest

from tests.ranks.agent_job import Job
from tests.ranks.users.cases import RANDPERM
from tests.ranks.users.end import notes
from tests.ranks.users.runs import Runs

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
END_S = 150  # a busy machine may take this long


def done(job: Job) -> list[str]:
    """Return in which generation and incarnation each rank got through."""
    return [
        (re.findall(r"done in (generation \d+, incarnation \d+)", job.log(rank)) or [""])[-1] for rank in range(3)
    ]


def test_groups_are_destroyed_also_with_a_clean_up_of_ones_own(tmp_path: Path) -> None:
    job = Job(tmp_path, "own_parts.py", "finalize", fork_here=False)  # one with a zygote that imports torch
    ended = job.end(END_S)
    assert done(job) == ["generation 1, incarnation 0"] * 3, ended.err


@pytest.mark.parametrize(("what", "generation"), [("evaluate", 1), ("raise", 2)])
def test_another_block_may_follow_the_one_that_trains(tmp_path: Path, what: str, generation: int) -> None:
    """Its groups meet in a store of their own: keys of the block before led a rank to sockets that were gone."""
    job = Job(tmp_path, "two_blocks.py", what)
    ended = job.end(END_S)
    assert done(job) == [f"generation {generation}, incarnation 0"] * 3, ended.err


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("train", "a block before this one has trained in this job"),
        ("kill", "a process was lost behind a block that all ranks had left"),
    ],
)
def test_what_another_block_cannot_be_recovered_from_is_said_in_one_line(
    tmp_path: Path, what: str, reason: str
) -> None:
    ended = Job(tmp_path, "two_blocks.py", what).end(END_S, code=1)
    assert reason in ended.err


@pytest.mark.parametrize(("how", "incarnation"), [("kill", 1), ("raise", 0)])
def test_who_waits_for_a_rank_that_was_lost_while_a_group_was_made_is_not_replaced(
    tmp_path: Path, how: str, incarnation: int
) -> None:
    """It waits in C++ for a connection that nobody makes, and there is none yet that could be cut."""
    job = Job(tmp_path, "own_parts.py", how)
    ended = job.end(END_S)
    assert done(job) == [f"generation 1, incarnation {each}" for each in (0, incarnation, 0)], ended.err


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("abort", "the abort"),
        ("device", "the device's work"),
        ("clean-up", "the clean-up"),
        ("health", "the health check"),
    ],
)
def test_what_hangs_on_the_way_to_the_barrier_is_replaced_after_the_abort_timeout(
    tmp_path: Path, what: str, said: str
) -> None:
    """It is replaced long before the limit for regrouping, which is longer than this test may take."""
    job = Job(tmp_path, "own_parts.py", what, regroup_timeout_s=600.0)
    ended = job.end(END_S)
    assert (tmp_path / "hung").exists()
    assert done(job)[0] == "generation 1, incarnation 1", ended.err
    assert f"{said} did not end within 1 s" in job.log(0)


def test_exit_0_in_the_block_is_its_end_like_any_other(tmp_path: Path) -> None:
    job = Job(tmp_path, "leaves_by_exit.py", "0:0", "1:None")
    ended = job.end(END_S)
    assert "incident" not in ended.err
    returned = [job.log(rank).split(f"rank {rank} ")[-1].strip() for rank in range(3)]
    assert returned == ["got None", "got None", "got returned"]


@pytest.mark.parametrize(
    ("code", "job_code"),
    [("3", 3), *(pytest.param(code, 1, marks=pytest.mark.long) for code in ("'no more data'", "256"))],
)
def test_another_exit_in_the_block_ends_the_job_with_that_code(tmp_path: Path, code: str, job_code: int) -> None:
    job = Job(tmp_path, "leaves_by_exit.py", f"1:{code}")
    ended = job.end(END_S, code=job_code)
    assert f"rank 1 left the block in step 3 by sys.exit({code})" in ended.err
    assert "incident" not in ended.err


def test_streams_that_are_seeded_before_the_block_are_the_same_at_every_entry(runs: Runs) -> None:
    faults = ("exception@before_optimizer:rank=0,step=3", "sigkill@before_optimizer:rank=1,step=4")
    calm, rough = runs.calm(RANDPERM), runs.make(RANDPERM, *faults)
    rough.assert_same(calm.steps)
    entries = [[notes(job.run_dir, rank, "order") for rank in range(3)] for job in (calm, rough)]
    entered = [[{line["generation"] for line in of_rank} for of_rank in of_job] for of_job in entries]
    assert entered == [[{0}] * 3, [{0, 1, 2}] * 3]
    assert len({str(line["order"]) for of_job in entries for of_rank in of_job for line in of_rank}) == 1
