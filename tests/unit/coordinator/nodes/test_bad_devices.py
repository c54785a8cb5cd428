"""Test what is done about a device that must not be used."""

from __future__ import annotations

import pytest

from checkpointless.launcher.protocol.messages import (
    DeviceBad,
    End,
    Go,
    Holding,
    RankEnded,
    Spawn,
)
from tests.unit.messaged_job import Job

WHY = "the device check exited with 1: no"


def bad(job: Job, rank: int) -> None:
    """Have the node of the rank refuse to start its next process."""
    job.tell(rank, DeviceBad(rank, job.coordinator.ranks[rank].incarnation, WHY))


def spawns(job: Job) -> list[tuple[int, int, int, bool]]:
    return [(node, each.rank, each.incarnation, each.anyway) for node, each in job.take(Spawn)]


def test_with_a_spare_the_node_is_given_up() -> None:
    job = Job().begin()
    spare = job.join(-1)
    job.ends(2)
    assert spawns(job) == [(1, 2, 1, False)]
    given_up = job.coordinator.nodes[1]
    bad(job, 2)
    ends = job.take(End)
    assert [(node, end.code) for node, end in ends] == [(1, 1)]
    assert ends[0][1].last_words == [f"the device of rank 2 must not be used: {WHY}"]
    assert job.coordinator.nodes[1] is spare
    assert {each[1:] for each in spawns(job)} == {(2, 1, False), (2, 2, False), (3, 1, False)}
    assert "node 1 is given up for a spare: the device of rank 2 must not be used" in job.said[-2]
    job.ready(*job.ranks)
    assert [node for node, _ in job.take(Go)] == [0, 1]
    job.sent.clear()
    job.hear(given_up, DeviceBad(2, 2, WHY))  # it is no part of the job any more
    assert job.sent == []


def test_without_a_spare_the_device_is_tried_until_the_limits_of_every_job_are_reached() -> None:
    job = Job().begin()
    tries = 0
    while job.outcome is None:
        tries += 1
        assert tries < 10
        job.ends(2)
        if job.outcome is None:
            job.sent.clear()
            bad(job, 2)
            assert spawns(job) == [(1, 2, tries, True)]
            assert f"rank 2 is started on it {'once more' if tries == 1 else 'again: add a spare'}" in job.said[-1]
            job.ready(*job.ranks, committed=3)
    assert tries > 3
    assert "in a row" in job.last_word


def test_the_node_that_hosts_the_coordinator_is_not_given_up() -> None:
    job = Job().begin()
    job.coordinator.job.host = job.coordinator.nodes[0]
    job.join(-1)
    job.ends(0)
    job.sent.clear()
    bad(job, 0)
    assert spawns(job) == [(0, 0, 1, True)]
    assert job.outcome is None


@pytest.mark.parametrize(("shards", "is_given_up"), [((0, 1, 0, 1), True), ((0, 0, 2, 2), False)])
def test_a_node_with_the_only_holders_of_a_shard_is_tried_first(shards: tuple[int, ...], is_given_up: bool) -> None:
    job = Job().begin()
    job.join(-1)
    job.progress(4)
    for index in (0, 1):
        job.hear(job.coordinator.nodes[index], Holding(list(shards[2 * index : 2 * index + 2])))
    job.ends(2)
    job.sent.clear()
    bad(job, 2)
    assert bool(job.take(End)) is is_given_up
    if not is_given_up:
        assert spawns(job) == [(1, 2, 1, True)]


def test_a_report_of_an_earlier_process_is_ignored() -> None:
    job = Job().begin()
    job.join(-1)
    job.ends(2)
    job.sent.clear()
    job.tell(2, DeviceBad(2, 0, WHY))
    job.tell(3, DeviceBad(3, 0, WHY))  # its process lives
    assert job.sent == []


def test_a_device_that_has_worked_since_is_tried_again() -> None:
    job = Job().begin()
    for step in (5, 6, 7):
        job.ends(2)
        job.sent.clear()
        bad(job, 2)
        assert spawns(job) == [(1, 2, job.coordinator.ranks[2].incarnation, True)]
        job.ready(*job.ranks)
        job.progress(step)
    assert job.outcome is None


def test_a_report_that_is_repeated_gets_the_same_answer_because_it_may_be_lost() -> None:
    job = Job().begin()
    job.ends(2)
    job.sent.clear()
    job.join(-1)
    job.hear(job.coordinator.nodes[0], Holding([0, 1]))
    job.hear(job.coordinator.nodes[1], Holding([2, 3]))
    job.coordinator.job.fresh.clear()  # rank 3 is the only one with what it holds
    for _ in range(3):
        bad(job, 2)
    assert spawns(job) == [(1, 2, 1, True)] * 3
    assert (job.outcome, job.take(End)) == (None, [])


def test_a_process_that_was_never_started_is_not_stillborn() -> None:
    job = Job().begin()
    job.raises(0)
    for _ in range(8):
        rank = job.coordinator.ranks[2]
        ended = RankEnded(2, rank.incarnation, -9, True, 3, 4, "rank-2.log", [], was_started=False)
        job.tell(2, RankEnded(2, 0, -9, False, 3, 4, "rank-2.log", []) if rank.incarnation == 0 else ended)
    assert job.outcome is None


def test_the_device_is_tried_when_there_is_a_store_again() -> None:
    job = Job().begin()
    job.ends(2)
    job.opens = False
    job.lose(job.coordinator.nodes[0], "it hosts the store")
    job.sent.clear()
    bad(job, 2)
    assert spawns(job) == []
    job.opens = True
    job.open_stores()
    assert (1, 2, 1, True) in spawns(job)
