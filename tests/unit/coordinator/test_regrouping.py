"""Test what the coordinator makes of faults, until the next generation begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.launcher.protocol.causes import CauseKind
from checkpointless.launcher.protocol.messages import (
    Alive,
    Answer,
    Done,
    FaultNotice,
    Go,
    RankState,
    Spawn,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from tests.unit.messaged_job import Job, at_barrier, go_env


def test_an_exception_interrupts_all_and_the_next_generation_begins_with_all() -> None:
    job = Job().begin()
    job.raises(2)
    interrupt = FaultNotice(0, "1", "rank 2 raised ValueError at step 4: no", 2)
    assert job.take(FaultNotice) == [(0, interrupt), (1, interrupt)]
    assert job.stores == [(0, 0), (1, 0)]
    job.ready(0, 1, 3, committed=4, making=5)
    assert job.take(Go) == []
    job.ready(2, committed=3, making=4)
    begin = Go(1, "1", go_env(1), high_water=4, target=5)
    assert job.take(Go) == [(0, begin), (1, begin)]
    assert job.take(Spawn) == []
    assert job.said == ["incident 1: rank 2 raised ValueError at step 4: no; recovering"]


def test_a_process_that_dies_is_replaced_alone() -> None:
    job = Job().begin()
    job.ends(2)
    assert [interrupt.rank for _, interrupt in job.take(FaultNotice)] == [2, 2]
    ((node, spawn),) = job.take(Spawn)
    assert (node, spawn.rank, spawn.incarnation, spawn.generation, spawn.incident) == (1, 2, 1, 1, "1")
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1]


def test_the_first_of_the_strongest_causes_is_told_and_a_victim_only_in_want_of_another() -> None:
    job = Job().begin()
    job.raises(0, CauseKind.VICTIM)
    assert [interrupt.rank for _, interrupt in job.take(FaultNotice)] == [None, None]
    assert job.said == []
    job.raises(1, what="raised KeyError")
    job.raises(2, what="raised OSError")
    job.ends(3)
    job.raises(0, CauseKind.VICTIM)
    assert len(job.take(FaultNotice)) == 2
    job.ready(*job.ranks)
    assert job.said == [
        "incident 1: rank 1 raised KeyError at step 4: no; recovering",
        "incident 1: rank 3 killed by SIGKILL at step 4; recovering",
    ]
    job.raises(0, CauseKind.VICTIM, generation=1)
    job.ready(*job.ranks)
    assert job.said[2:] == [
        "incident 1: escalated: incident 2 came before a step was made",
        "incident 2: rank 0 raised ValueError at step 4: no; recovering",
    ]


@pytest.fixture
def logged(tmp_path: Path) -> Job:
    return Job(events=tmp_path / "events.jsonl").begin()


def test_every_step_up_says_why(logged: Job, tmp_path: Path) -> None:
    job = logged
    job.raises(0)
    job.ready(*job.ranks, committed=3, making=4)
    _, two = job.coordinator.nodes
    job.ends(1)
    job.lose(two, "it closed the connection")
    job.join(1)
    job.ready(*job.ranks, committed=3, making=4)
    job.progress(0)
    ups = [event for event in read_events(tmp_path) if event.stage == EventName.RUNG]
    assert [(up.incident, up.fields["rung"], up.fields["why"]) for up in ups] == [
        ("2", "process", "rank 1 killed by SIGKILL at step 4"),
        ("2", "node", "node 1 was lost at step 4: it closed the connection"),
        ("2", "job", "storage or copies brought step 0 back; step 3 had been committed"),
    ]
    assert job.said[-1] == "incident 2: storage or copies brought step 0 back; step 3 had been committed"


def test_what_is_stale_is_ignored() -> None:
    job = Job().begin()
    job.ends(2)
    job.ready(*job.ranks)
    job.sent.clear()
    job.said.clear()
    job.raises(0, generation=0)
    job.tell(0, Done(0, rank=0))
    job.ends(2, incarnation=0)
    job.tell(2, at_barrier(2, 0, -1, -1))
    job.tell(0, Answer(1, False, "of an inquiry that nobody made", rank=0))
    job.tell(0, Alive())
    assert {rank.state for rank in job.coordinator.ranks} == {RankState.RUNNING}
    assert (job.sent, job.said) == ([], [])


def test_a_fault_during_the_recovery_belongs_to_the_incident() -> None:
    job = Job().begin()
    job.raises(2)
    job.ready(0, 1, 2)
    job.ends(0)
    job.ready(3)
    assert job.take(Go) == []
    job.ready(0)
    assert [(begin.generation, begin.incident) for _, begin in job.take(Go)] == [(1, "1")] * 2


def test_a_rank_that_has_returned_within_a_step_is_named_before_the_others_count_as_stalled() -> None:
    """It has caught an exception; the others wait for it in a collective."""
    job = Job().begin()
    job.tell(1, Done(0, committed=3, making=4, rank=1))
    job.tick()
    assert job.said == []
    job.tick(after_s=1.5)
    job.tick(after_s=3.0)
    (line,) = job.said
    assert line.startswith("rank 1 returned from its block in unfinished step 4, and other ranks did not")


@pytest.mark.parametrize("making", [3, 4])
def test_ranks_that_return_together_or_behind_their_last_step_are_not_named(making: int) -> None:
    job = Job().begin()
    job.tell(1, Done(0, committed=3, making=making, rank=1))
    for rank in job.ranks if making == 4 else ():
        job.tell(rank, Done(0, committed=3, making=making, rank=rank))
    job.tick(after_s=1.5)
    assert job.said == []
