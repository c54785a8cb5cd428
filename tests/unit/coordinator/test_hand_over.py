"""Test when the coordinator has processes hand their state to new ones."""

from __future__ import annotations

from pathlib import Path

from checkpointless.launcher.protocol.messages import Go, HandOver, Spawn
from checkpointless.observability.telemetry.event_names import EventName, Rung
from checkpointless.observability.telemetry.events import read_events
from tests.unit.messaged_job import Job

UNFIT = "rank 1 could not enter its block again"


def hand_over(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.ends(rank, 75, forgiven=True, handed_over=True)


def test_all_processes_hand_over_once_all_are_at_the_barrier(tmp_path: Path) -> None:
    job = Job(events=tmp_path / "events.jsonl").begin()
    job.raises(1)
    job.ready(1, entered=True, unfit=UNFIT)
    job.ready(0, 2, committed=4, entered=True)
    assert job.take(HandOver) == []
    job.ready(3, committed=3, entered=True)
    assert job.take(HandOver) == [(0, HandOver(0, 4, [0, 1])), (1, HandOver(0, 4, [2, 3]))]
    assert any(UNFIT in line for line in job.said)
    hand_over(job, *job.ranks)
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [0, 1, 2, 3]
    assert job.take(Go) == []
    job.ready(*job.ranks, committed=4)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1]
    rungs = [event.fields["rung"] for event in read_events(tmp_path) if event.stage == EventName.RUNG]
    assert rungs == [Rung.OWN_STATE.label]


def test_where_it_was_needed_once_it_is_done_at_every_fault_to_processes_that_were_in_their_block() -> None:
    job = Job().begin()
    job.raises(1)
    job.ready(*job.ranks, entered=True, unfit=UNFIT)
    hand_over(job, *job.ranks)
    job.ready(*job.ranks, committed=4)
    job.sent.clear()
    job.ends(2)
    job.ready(2, committed=4)
    job.ready(0, 1, 3, committed=4, entered=True)
    assert [command.ranks for _, command in job.take(HandOver)] == [[0, 1], [3]]
    assert len([line for line in job.said if UNFIT in line]) == 1
