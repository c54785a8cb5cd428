"""Test restarts of the whole job, where it would end."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.launcher.coordinator.incident_policy import SAME_FAILURE_LIMIT
from checkpointless.launcher.coordinator.job import Phase
from checkpointless.launcher.coordinator.regrouping import SAME_FAILURE_S
from checkpointless.launcher.protocol.causes import exception_cause
from checkpointless.launcher.protocol.messages import (
    FaultNotice,
    FaultReport,
    GiveUp,
    Go,
    OneEnded,
    RankEnded,
    Spawn,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from tests.unit.messaged_job import Job

LOST = "no living rank holds the shard of rank 2"


def lose_state(job: Job) -> None:
    """Have every node say that no rank holds the state of this generation."""
    generation = job.coordinator.job.generation
    for node in job.coordinator.nodes:
        job.hear(node, GiveUp(generation, LOST, is_lost=True))


def begin_after_a_death(max_restarts: int, events: Path | None = None) -> Job:
    """Return a job that has begun again because rank 2 died in step 8."""
    job = Job(max_restarts=max_restarts, events=events).begin()
    job.ends(2)
    job.ready(*job.ranks, committed=7, making=8)
    job.sent.clear()
    return job


def test_a_job_whose_state_is_lost_begins_again_with_new_processes(tmp_path: Path) -> None:
    job = begin_after_a_death(1, tmp_path / "events.jsonl")
    lose_state(job)
    assert job.coordinator.job.outcome is None
    spawns = [spawn for _, spawn in job.take(Spawn)]
    assert [(spawn.rank, spawn.incarnation) for spawn in spawns] == [(0, 1), (1, 1), (2, 2), (3, 1)]
    assert all(spawn.afresh and spawn.generation == 2 and spawn.incident == "1" for spawn in spawns)
    assert job.said[-1].startswith(f"incident 1: restart 1 of 1: {LOST}; every rank begins again")
    for rank in job.ranks:  # the processes from before end: that is no news
        job.ends(rank, 1, incarnation=spawns[rank].incarnation - 1)
    assert len(job.take(Spawn)) == 4
    job.ready(*job.ranks, committed=7, making=8)
    begins = [begin for _, begin in job.take(Go)]
    assert [(begin.generation, begin.origin, begin.high_water, begin.target) for begin in begins] == [
        (2, 2, 7, 8)
    ] * 2
    job.progress(5, 9, began_after=5, generation=2)
    assert job.said[-1] == "incident 1: the script itself brought step 5 back; step 7 had been committed"
    assert job.coordinator.job.high_water == 9
    job.progress(9, began_after=5, generation=2)
    assert job.said[-1].endswith("(job); 2 steps are made once more")
    why = [event.fields["why"] for event in read_events(tmp_path) if event.stage == EventName.RUNG]
    assert f"restart 1 of 1: {LOST}" in why


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_job_without_a_restart_left_ends_with_the_reason(max_restarts: int) -> None:
    job = begin_after_a_death(max_restarts)
    for _ in range(max_restarts):
        lose_state(job)
        job.ready(*job.ranks)
    assert job.coordinator.job.outcome is None
    lose_state(job)
    line = job.last_word
    assert line.startswith(LOST)
    assert line.endswith("--max-restarts N" if max_restarts == 0 else "the job was restarted 2 times")


def test_an_exception_that_comes_again_and_again_is_worth_a_restart() -> None:
    job = Job(max_restarts=1).begin()
    for generation in range(2 * SAME_FAILURE_LIMIT):
        assert job.coordinator.job.outcome is None
        job.raises(0, generation=job.coordinator.job.generation)
        job.ready(*job.ranks)
        if generation == SAME_FAILURE_LIMIT - 1:
            assert len({spawn.rank for _, spawn in job.take(Spawn)}) == 4
            job.ready(*job.ranks)
    assert job.outcome is not None
    assert "3 times in a row" in job.outcome.last_words[0]


def test_every_node_knows_of_the_first_rank_that_ends_well() -> None:
    job = Job(max_restarts=1).join_all()
    job.ends(3, 0)
    job.ends(2, 0)
    assert [(node, message.rank) for node, message in job.take(OneEnded)] == [(0, 3), (1, 3)]
    job.ends(0, 1)  # all begin again
    assert len(job.take(Spawn)) == 8
    job.sent.clear()
    job.ends(1, 0)
    assert [message.rank for _, message in job.take(OneEnded)] == [1, 1]


def fail_before_the_first_step(job: Job, rank: int, error: str = "ValueError", step: int = -1) -> None:
    cause = exception_cause(rank, error, "devices=4", "Traceback", step, victim=error == "a victim's")
    job.tell(rank, FaultReport(job.coordinator.job.generation, cause, rank=rank))


def test_what_all_ranks_raise_before_the_first_step_ends_the_job_at_once() -> None:
    job = Job(max_restarts=3).begin()
    for rank in job.ranks:
        assert job.coordinator.job.outcome is None
        fail_before_the_first_step(job, rank)
    assert job.take(FaultNotice) == []
    reason = "all 4 ranks raised ValueError before the first step: devices=4"
    assert job.outcome is not None
    assert job.outcome.last_words == [reason, "Traceback"]


@pytest.mark.parametrize("other", ["nothing", "KeyError", "a victim's", "a step", "a death"])
def test_what_not_all_ranks_raise_before_the_first_step_is_tried_again(job: Job, other: str) -> None:
    fail_before_the_first_step(job, 0)
    fail_before_the_first_step(job, 1)
    assert job.take(FaultNotice) == []  # the others may be about to raise it, too
    if other == "nothing":
        job.tick(SAME_FAILURE_S + 1)
    elif other == "a death":
        job.ends(2)
    else:
        is_late = other == "a step"
        fail_before_the_first_step(job, 2, "ValueError" if is_late else other, 1 if is_late else -1)
    assert len(job.take(FaultNotice)) == 2
    job.ready(*job.ranks)
    assert job.coordinator.job.generation == 1
    assert job.outcome is None
    job.tick(SAME_FAILURE_S + 1)
    assert len(job.take(FaultNotice)) == 2
    fail_before_the_first_step(job, 0)  # in a later generation nobody waits
    assert len(job.take(FaultNotice)) == 4


def test_a_script_without_a_block_is_restarted_as_torchrun_does() -> None:
    job = Job(max_restarts=1).join_all()
    job.ends(1, 3, incarnation=0)
    assert job.coordinator.job.outcome is None
    assert len([spawn for _, spawn in job.take(Spawn) if spawn.incarnation == 1]) == 4
    job.tick(10_000)  # nobody has entered a block, so nobody is waited for there
    assert job.coordinator.job.phase is Phase.GATHERING
    for rank in job.ranks:
        job.tell(rank, RankEnded(rank, 1, 0, False, -1, -1, "log", []))
    assert job.outcome is not None
    assert job.outcome.code == 0
    again = Job(max_restarts=0).join_all()
    again.ends(1, 3, incarnation=0)
    assert again.last_word.startswith("rank 1 exited with code 3")
