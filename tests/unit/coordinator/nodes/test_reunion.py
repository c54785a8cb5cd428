"""Test a node that comes back with its ranks to the coordinator that knew it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.job import Phase
from checkpointless.launcher.protocol.messages import (
    Discard,
    FaultNotice,
    Go,
    Joined,
    RankEnded,
    RankState,
    Searching,
    Spawn,
)
from tests.drawn import examples
from tests.unit.coordinator.nodes.standings import back, goes_searching
from tests.unit.messaged_job import REGROUP_S, Job

RUNNING, DONE = RankState.RUNNING, RankState.DONE


@pytest.mark.parametrize("more", [{"generation": 1}, {"run_id": "another"}, {"finished": True}])
def test_a_node_that_comes_back_from_elsewhere_has_to_end_its_ranks_first(more: dict[str, Any]) -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "no word from it for 10 s")
    node = back(job, 1, RUNNING, RUNNING, **more)
    assert job.take(Discard) == [(1, Discard())]
    job.ready(2, 3)  # these were under way when it was told
    job.ready(0, 1)
    assert (job.take(Go), job.take(Spawn)) == ([], [])
    job.hear(node, Joined())
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1]


def test_a_node_that_lost_sight_of_the_coordinator_comes_back_and_nobody_is_told() -> None:
    job = Job().begin()
    goes_searching(job)
    job.tick(5.0)
    assert job.sent == []
    back(job, 1, RUNNING, RUNNING)
    assert (job.sent, job.said) == ([], ["node 1 is back with its ranks, and nobody had missed it"])
    job.tick(60.0)
    job.ends(3)
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(3, 1)]


def test_a_node_that_is_back_and_says_nothing_is_not_waited_for_without_end() -> None:
    job = Job().begin()
    job.raises(0)
    job.ready(1, 2, 3)
    goes_searching(job)
    job.admit(1)
    job.ready(0)
    job.tick(REGROUP_S - 1)
    assert "it came back and did not say what its ranks do" not in " ".join(job.said)
    job.tick(REGROUP_S + 1)
    assert "it came back and did not say what its ranks do" in " ".join(job.said)
    assert job.outcome is None  # there is time for another node
    job.hear(job.coordinator.nodes[1], Joined())
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(2, 1), (3, 1)]
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1]


@pytest.mark.parametrize("searching", [True, False])
def test_ranks_that_did_not_hear_that_a_generation_began_are_kept(searching: bool) -> None:
    job = Job().begin()
    job.raises(0)
    job.ready(*job.ranks)
    node = job.coordinator.nodes[1]
    if searching:
        job.hear(node, Searching())
    job.lose(node, "it closed the connection before the command arrived")
    job.sent.clear()
    back(job, 1, RankState.READY, RankState.READY)
    assert (job.take(Discard), job.take(Spawn)) == ([], [])
    assert [notice.generation for index, notice in job.take(FaultNotice) if index == 0] == (
        [1] if searching else []
    )
    words = "node 1 did not hear that generation 1 began" if searching else "node 1 was lost"
    assert any(words in line for line in job.said)
    job.ready(0, 1)
    assert [begin.generation for _, begin in job.take(Go)] == [2, 2]


def test_a_node_that_is_lost_before_it_has_spoken_is_not_waited_for_twice() -> None:
    job = Job().begin()
    goes_searching(job)
    job.later_s = 6.0
    job.lose(job.admit(1), "it closed the connection")
    job.tick(3.9)
    assert job.said == []
    job.tick(4.1)
    assert sum("node 1 was lost" in line for line in job.said) == 1
    job.later_s = REGROUP_S + 20
    job.tick()
    assert "and no other took its place within 30 s" in job.last_word


def test_ranks_that_missed_several_generations_are_kept_and_those_of_an_earlier_holder_are_not() -> None:
    job = Job().begin()
    for _ in range(2):
        job.raises(0)
        job.ready(0, 1)
        for rank in (2, 3):
            if job.coordinator.ranks[rank].state is not RankState.READY:
                job.ready(rank)
        goes_searching(job)
        job.sent.clear()
        back(job, 1, RankState.READY, RankState.READY)
        assert job.take(Discard) == []
    assert job.coordinator.job.generation == 2
    job.lose(job.coordinator.nodes[1], "no word from it")
    job.lose(job.join(1), "another machine, which is lost, too")
    job.sent.clear()
    back(job, 1, RankState.READY, RankState.READY)
    assert job.take(Discard) == [(1, Discard())]


LIVING = [state for state in RankState if state is not RankState.FINISHED]


@examples(150)
@given(
    st.lists(st.sampled_from(LIVING), min_size=2, max_size=2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
)
def test_whatever_its_ranks_did_meanwhile_a_node_that_comes_back_keeps_those_that_live(
    states: list[RankState], searching: bool, interrupted: bool, others_ready: bool, lost_again: int | None
) -> None:
    job = Job().begin()
    for _ in range(lost_again or 1):
        node = job.coordinator.nodes[1]
        if searching:
            job.hear(node, Searching())
        job.lose(node, "no word from it")
        if interrupted:
            job.raises(0)
        if others_ready and job.coordinator.job.phase is not Phase.RUNNING:
            job.ready(0, 1)
        job.sent.clear()
        back(job, 1, *states)
        if job.coordinator.job.generation == 1:
            break
    assert job.outcome is None
    assert job.take(Discard) == []
    if job.coordinator.job.generation == 0:
        if job.coordinator.job.phase is Phase.RUNNING:
            assert set(states) <= {RUNNING, DONE, RankState.STARTING, RankState.LEAVING}
            job.raises(0)
        job.ready(*(rank.number for rank in job.coordinator.ranks if rank.state is not RankState.READY))
    assert {begin.generation for _, begin in job.take(Go)} == {1}
    for rank, state in zip((2, 3), states, strict=True):
        assert (job.coordinator.ranks[rank].incarnation == 0) == (state is not RankState.GONE)
    assert {job.coordinator.ranks[rank].incarnation for rank in (0, 1)} == {0}


def test_a_rank_that_failed_after_its_block_while_its_node_was_away_fails_the_job() -> None:
    job = Job().begin()
    job.returns()
    goes_searching(job)
    failed = RankEnded(2, 0, 1, False, 3, 4, "rank-2.log", ["it could not save"])
    back(job, 1, RankState.GONE, RankState.FINISHED, before=failed, finished=True)
    assert job.last_word == "rank 2 exited with code 1; its log: rank-2.log"


def test_a_rank_that_waits_for_the_next_block_and_dies_unheard_is_replaced() -> None:
    job = Job().begin()
    job.returns()
    job.ready(1, 2, 3)
    goes_searching(job)
    back(job, 1, RankState.GONE, RankState.READY, finished=True)
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [2]
    job.ready(0, 2)
    assert [begin.generation for _, begin in job.take(Go)] == [1, 1]
