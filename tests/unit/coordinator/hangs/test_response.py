"""Test what the coordinator makes of ranks without progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from checkpointless.launcher.coordinator.hang_watch import STEADY_LOOKS
from checkpointless.launcher.coordinator.job import Phase
from checkpointless.launcher.protocol.messages import (
    Answer,
    FaultNotice,
    Go,
    Inquire,
    Kill,
    Silent,
    SilentRank,
)
from tests.unit.messaged_job import HEARTBEAT_S, NPROC, Job


def silent(job: Job, *rows: tuple[int, float, bool], beat: int = 7, letter: str = "S") -> None:
    """Have nodes report ranks: number, for how many seconds they are silent, whether they are within step 4."""
    for node in job.coordinator.nodes:
        ranks = [
            SilentRank(rank, beat, int(1000 * age_s), int(1000 * age_s), 4, in_step, ord(letter), 0)
            for rank, age_s, in_step in rows
            if rank // NPROC == node.index
        ]
        job.hear(node, Silent(ranks))


def silence(job: Job, *ranks: int, beat: int = 7, age_s: float = HEARTBEAT_S + 0.1, letter: str = "S") -> None:
    silent(job, *((rank, age_s, False) for rank in ranks), beat=beat, letter=letter)


def notices(job: Job, at_least_s: float = HEARTBEAT_S) -> list[tuple[int, FaultNotice]]:
    """Take the notices; the hang counts from the last progress."""
    incident = job.coordinator.job.incidents.open
    assert incident is not None
    assert at_least_s <= (incident.undetected_s or -1.0) < at_least_s + 60
    return job.take(FaultNotice)


def wait_in_silence(job: Job, *ranks: int, seconds: float = 6.0, letter: str = "S") -> None:
    """Let time pass, in which these ranks stay where they are."""
    for _ in range(int(seconds)):
        job.later_s += 1.0
        silence(job, *ranks, age_s=HEARTBEAT_S + job.later_s, letter=letter)
        job.tick()


def test_who_waits_in_no_collective_is_asked_to_leave_and_replaced_if_it_does_not() -> None:
    job = Job(nnodes=3).begin()
    job.progress(3)
    silence(job, 0, 4, 5)
    job.tick()
    assert job.take(Inquire) == [(0, Inquire(1, [0])), (2, Inquire(1, [4, 5]))]
    job.tell(0, Answer(1, True, "in a collective", rank=0))
    job.tell(4, Answer(1, False, "elsewhere", rank=4))
    job.tick()
    assert job.take(FaultNotice) == []
    job.tell(5, Answer(1, True, "in a collective", rank=5))
    job.tick()
    cause = "rank 4 made no progress for 10 s at step 4"
    assert notices(job) == [(node, FaultNotice(0, "1", cause, 4)) for node in (0, 1, 2)]
    job.later_s = 4.9
    job.tick()
    assert job.take(Kill) == []
    job.later_s = 5.1
    job.tick()
    assert job.take(Kill) == [(2, Kill(4, 0, 0, 7))]
    job.ends(4, forgiven=True)
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1, 1]


def test_who_does_not_answer_again_and_again_hangs(job: Job) -> None:
    job.progress(3)
    silence(job, 3)
    job.tick()
    wait_in_silence(job, 3, seconds=4)
    assert len(job.take(Inquire)) >= 3
    assert job.take(FaultNotice) == []
    wait_in_silence(job, 3, seconds=2)
    assert job.take(Kill) == [(1, Kill(3, 0, 0, 7))]


@pytest.mark.parametrize("letter", ["R", "D", "t"])
def test_who_cannot_answer_is_waited_for(job: Job, letter: str) -> None:
    job.progress(3)
    wait_in_silence(job, 3, seconds=15, letter=letter)
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])
    assert "rank 3 of 4 has made no progress" in job.said[0]
    wait_in_silence(job, 3, seconds=10, letter=letter)
    assert job.take(Kill) == [(1, Kill(3, 0, 0, 7))]


def test_a_node_that_has_not_spoken_of_its_ranks_since_does_not_accuse_them(job: Job) -> None:
    job.progress(3)
    silence(job, 3)
    job.tick()
    for _ in range(20):
        job.later_s += 1.0
        job.tick()
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 2), (2, 3)])
def test_a_stall_that_many_share_is_waited_for_and_told(ranks: tuple[int, ...]) -> None:
    job = Job(heartbeat_timeout_s=None).begin()
    job.progress(3, longest_ms=1000)
    job.sent.clear()
    for age_s in range(28, 120):
        job.later_s += 1.0
        stall(job, ranks, age_s)
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])
    told = [line for line in job.said if "made no progress" in line]
    assert len(told) == 1
    assert "read in data.py:31" in told[0]


def test_a_shared_stall_beyond_the_ceiling_is_an_incident_in_which_nobody_is_killed() -> None:
    job = Job(heartbeat_timeout_s=None).begin()
    job.progress(3, longest_ms=1000)
    for age_s in range(30, 610):
        job.later_s += 1.0
        stall(job, (0, 1, 2, 3), age_s)
    assert "incident 1: ranks 0-3 made no progress for 600 s at step 4" in job.said[-1]
    assert len(job.take(FaultNotice)) == 2
    assert job.take(Kill) == []
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1]


def stall(job: Job, ranks: Sequence[int], age_s: float) -> None:
    """Have ``ranks`` make no progress in step 4 and answer so; the others wait for them in a collective."""
    stack = 'File "/a/data.py", line 31, in read\n    file.read()\n'
    if job.coordinator.job.outcome is not None or job.coordinator.job.phase is not Phase.RUNNING:
        return
    silent(job, *((rank, age_s, True) for rank in job.ranks))
    job.tick()
    for _, ask in job.take(Inquire):
        for rank in ask.ranks:
            job.tell(rank, Answer(ask.id, rank not in ranks, stack, rank=rank))
    job.tick()


def test_ranks_that_all_wait_for_each_other_leave_together_and_nobody_is_killed(job: Job) -> None:
    silence(job, *job.ranks)
    job.tick()
    for rank in job.ranks:
        job.tell(rank, Answer(1, True, "in a collective", rank=rank))
    job.tick()
    cause = "ranks waited for each other with no progress for 10 s at step 4"
    assert job.take(FaultNotice) == []  # nobody has ever shown progress
    job.progress(3)
    wait_in_silence(job, *job.ranks, seconds=2)
    for rank in job.ranks:
        job.tell(rank, Answer(2, True, "in a collective", rank=rank))
    job.tick()
    assert notices(job) == [(node, FaultNotice(0, "1", cause, None)) for node in (0, 1)]
    assert job.take(Kill) == []


@pytest.mark.parametrize("again", [(), (3,)])
def test_a_rank_that_moved_on_since_it_was_asked_is_left_alone(job: Job, again: tuple[int, ...]) -> None:
    job.progress(3)
    silence(job, 3)
    job.tick()
    silence(job, *again, beat=8, age_s=HEARTBEAT_S * 0.95)
    job.tell(3, Answer(1, False, "elsewhere", rank=3))
    job.tick()
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])


def test_a_rank_in_a_step_has_the_limit_of_steps_and_one_that_writes_a_checkpoint_more() -> None:
    job = Job(nnodes=4, heartbeat_timeout_s=None).begin()
    job.progress(3, longest_ms=2000)
    silent(job, (0, 29.0, True), (1, 28.5, True), (2, 28.5, True))
    job.tick()
    assert job.take(Inquire) == []
    silent(job, (0, 30.1, True), (1, 29.6, True), (2, 29.6, True), (3, 100.0, False))
    job.tick()
    assert job.take(Inquire) == [(0, Inquire(1, [0, 1])), (1, Inquire(1, [2]))]
    for rank in range(3):
        job.tell(rank, Answer(1, rank > 0, "a stack", rank=rank))
    job.tick()
    assert [notice.cause for _, notice in notices(job, 30.0)] == ["rank 0 made no progress for 30 s at step 4"] * 4


def test_a_rank_that_stays_idle_while_others_wait_hangs_also_before_anybody_showed_progress() -> None:
    job = Job(nnodes=4).begin()
    looks = 0
    while not job.take(FaultNotice) and looks < 30:
        looks += 1
        job.later_s += 0.5
        silence(job, *job.ranks, age_s=HEARTBEAT_S + job.later_s)
        job.tick()
        for _, ask in job.take(Inquire):
            for rank in ask.ranks:
                job.tell(rank, Answer(ask.id, rank > 0, "a stack", rank=rank))
        job.tick()
    assert job.later_s > STEADY_LOOKS
    assert job.said == ["incident 1: rank 0 made no progress for 10 s at step 4; recovering"]
