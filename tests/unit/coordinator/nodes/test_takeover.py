"""Test a coordinator that finds the ranks of its job running."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointless.coordinator.job import Phase
from checkpointless.coordinator.nodes.reunion import Reunion, assumed, reunite
from checkpointless.coordinator.roster import Node
from checkpointless.wire.causes import CauseKind
from checkpointless.wire.node_messages import (
    AllDone,
    Begin,
    Discard,
    End,
    FaultNotice,
    Joined,
    NodeMessage,
    RankEnded,
    RankStanding,
    Searching,
    Spawn,
    Standing,
)
from checkpointless.wire.rank_state import RankState
from tests.unit.messaged_job import NPROC, REGROUP_S, Job, trouble

RUNNING, DONE = RankState.RUNNING, RankState.DONE


def standing(
    job: Job,
    index: int,
    *states: RankState,
    generation: int = 3,
    finished: bool = False,
    incarnation: int = 1,
    before: NodeMessage | None = None,
    run_id: str = "the run",
) -> Node:
    """Have a node say what its ranks were doing while there was no coordinator."""
    node = job.admit(index)
    if before is not None:
        job.hear(node, before)
    ranks = [
        RankStanding(index * NPROC + local, incarnation, state, 7 + local, 8 + local)
        for local, state in enumerate(states)
    ]
    job.hear(node, Standing(generation, 2, 6, run_id, finished, ranks))
    return node


def test_ranks_that_train_are_not_disturbed_and_their_next_fault_is_handled() -> None:
    job = Job()
    standing(job, 0, RUNNING, RUNNING)
    assert job.said == []
    standing(job, 1, RUNNING, RUNNING)
    assert job.said == ["took the job over in generation 3: its ranks train undisturbed"]
    assert (job.sent, job.stores) == ([], [])
    job.ends(1)
    assert job.said[1:] == ["incident 3: rank 1 killed by SIGKILL at step 4; recovering"]
    assert [interrupt.generation for _, interrupt in job.take(FaultNotice)] == [3, 3]
    ((_, spawn),) = job.take(Spawn)
    assert (spawn.rank, spawn.incarnation, spawn.generation) == (1, 2, 4)
    assert spawn.env["TORCHELASTIC_RUN_ID"] == "the run"
    job.ready(*job.ranks, committed=8, making=9)
    assert [(begin.generation, begin.high_water) for _, begin in job.take(Begin)] == [(4, 8), (4, 8)]


def test_a_rank_that_died_in_between_is_replaced() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    standing(job, 0, RUNNING, RankState.GONE, before=RankEnded(1, 1, -11, False, 7, 8, "rank-1.log", []))
    assert job.said[1] == "incident 3: rank 1 killed by SIGSEGV at step 8; recovering"
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [1]


def test_an_exception_that_nobody_heard_of_is_handled() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    standing(job, 0, RUNNING, RUNNING, before=trouble(1, CauseKind.EXCEPTION, generation=3))
    assert job.said[1] == "incident 3: rank 1 raised ValueError at step 4: no; recovering"
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [4, 4]


def test_a_node_that_was_lost_with_the_coordinator_is_replaced() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    job.join(0)
    assert job.said[1] == "incident 3: node 0 was lost at step 9: as was the coordinator; recovering"
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(0, 2), (1, 2)]
    assert job.stores == [(4, 0)]


def test_a_spare_takes_the_place_of_a_node_that_does_not_find_the_new_coordinator() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    job.join(-1)
    job.tick(9.0)
    assert job.take(Spawn) == []
    job.tick(10.5)
    assert "a spare takes the place of node 0" in job.said
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [0, 1]


def test_a_spare_may_come_later_than_the_time_that_a_missing_node_had() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    job.tick(10.5)
    assert "no spare is ready" in job.said[-1]
    job.join(-1)
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [0, 1]


def test_a_node_that_is_nowhere_ends_the_job_in_time() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    job.tick(10.5)
    assert "no spare is ready" in job.said[-1]
    job.tick(REGROUP_S + 1)
    assert job.last_word == "node 0 did not join the job within 30 s"


def test_ranks_that_were_finished_may_end() -> None:
    job = Job()
    standing(job, 0, DONE, DONE)
    standing(job, 1, RankState.FINISHED, RankState.GONE, finished=True)
    assert [node for node, _ in job.take(AllDone)] == [0, 1]
    for rank in (0, 1, 2):
        job.ends(rank, 0)
    assert job.outcome == End(0, [])


def test_a_finished_rank_that_failed_in_between_is_no_success() -> None:
    job = Job()
    standing(job, 1, RankState.GONE, RankState.GONE, finished=True)
    job.hear(job.coordinator.nodes[1], RankEnded(3, 1, 3, False, 7, 8, "rank-3.log", []))
    standing(job, 0, DONE, DONE)
    assert job.last_word == "rank 3 exited with code 3"


def back(job: Job, index: int, *states: RankState, **more: Any) -> Node:
    """Bring a node back to the coordinator that began generation 0 of a job with it."""
    more = {"generation": 0, "incarnation": 0, "run_id": job.run_id, **more}
    return standing(job, index, *states, **more)


def test_a_node_that_was_taken_for_lost_is_taken_back_with_its_processes() -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "no word from it for 10 s")
    job.sent.clear()
    back(job, 1, RUNNING, RankState.LEAVING)
    assert job.take(Discard) == []
    assert [(index, interrupt.generation) for index, interrupt in job.take(FaultNotice)] == [(1, 0)]
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]
    assert job.take(Spawn) == []
    assert {rank.incarnation for rank in job.coordinator.ranks} == {0}


@pytest.mark.parametrize("more", [{"generation": 1}, {"run_id": "another"}, {"finished": True}])
def test_a_node_that_comes_back_from_elsewhere_has_to_end_its_ranks_first(more: dict[str, Any]) -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "no word from it for 10 s")
    node = back(job, 1, RUNNING, RUNNING, **more)
    assert job.take(Discard) == [(1, Discard())]
    job.ready(2, 3)  # these were under way when it was told
    job.ready(0, 1)
    assert (job.take(Begin), job.take(Spawn)) == ([], [])
    job.hear(node, Joined())
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_a_node_that_lost_sight_of_the_coordinator_comes_back_and_nobody_is_told() -> None:
    job = Job().begin()
    node = job.coordinator.nodes[1]
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
    job.tick(5.0)
    assert job.sent == []
    back(job, 1, RUNNING, RUNNING)
    assert (job.sent, job.said) == ([], ["node 1 is back with its ranks, and nobody had missed it"])
    job.tick(60.0)
    job.ends(3)
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(3, 1)]


def test_a_node_that_lost_sight_of_the_coordinator_and_does_not_come_back_is_lost() -> None:
    job = Job().begin()
    node = job.coordinator.nodes[1]
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
    job.tick(10.1)
    assert "node 1 was lost" in job.said[0]
    back(job, 1, RUNNING, RUNNING)
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_a_node_that_looked_for_the_coordinator_and_comes_back_empty_gets_new_processes() -> None:
    job = Job().begin()
    node = job.coordinator.nodes[1]
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
    job.join(1)
    assert "node 1 was lost" in job.said[0]
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(2, 1), (3, 1)]
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_a_process_that_ended_while_its_node_was_away_gets_one_successor() -> None:
    job = Job().begin()
    node = job.coordinator.nodes[1]
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
    job.ends(0)
    job.sent.clear()
    node = job.admit(1)
    job.ends(2)  # it was kept, and comes first
    standing = Standing(
        0, 0, -1, job.run_id, False, [RankStanding(2, 0, RankState.GONE, 3, 4), RankStanding(3, 0, RUNNING, 3, 4)]
    )
    job.hear(node, standing)
    assert [spawn.rank for index, spawn in job.take(Spawn) if index == 1] == [2]
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


@pytest.mark.parametrize("searching", [True, False])
def test_a_rank_that_a_node_was_never_told_to_start_is_started(searching: bool) -> None:
    job = Job().begin()
    for rank in (2, 3):
        job.ends(rank)
    node = job.coordinator.nodes[1]
    if searching:
        job.hear(node, Searching())
    job.lose(node, "the connection broke between two commands")
    job.sent.clear()
    node = job.admit(1)
    starting = RankStanding(2, 1, RankState.STARTING, 3, 4)
    job.hear(node, Standing(0, 1, 3, job.run_id, False, [starting]))
    assert [spawn.rank for index, spawn in job.take(Spawn) if index == 1] == [3]
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_ranks_that_train_for_a_node_that_is_taken_for_new_are_interrupted() -> None:
    assert reunite(RankState.STARTING, RUNNING) is Reunion.INTERRUPT


def test_a_node_that_is_back_and_says_nothing_is_not_waited_for_without_end() -> None:
    job = Job().begin()
    node = job.coordinator.nodes[1]
    job.raises(0)
    job.ready(1, 2, 3)
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
    job.admit(1)
    job.ready(0)
    job.tick(REGROUP_S + 1)
    assert "node 1 was lost" in " ".join(job.said) or job.outcome is not None


def test_no_generation_begins_before_a_node_that_is_back_has_said_what_its_ranks_do() -> None:
    job = Job().begin()
    node = job.coordinator.nodes[1]
    job.raises(0)
    job.ready(1, 2, 3)
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")
    node = job.admit(1)
    job.ready(0)
    assert job.take(Begin) == []
    ready = [RankStanding(rank, 0, RankState.READY, 3, 4) for rank in (2, 3)]
    job.hear(node, Standing(0, 1, 3, job.run_id, False, ready))
    assert job.take(Discard) == []
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_a_node_that_comes_back_to_a_spare_whose_ranks_wait_for_it_ends_no_job() -> None:
    job = Job().begin()
    for index in (1, 0):
        job.lose(job.coordinator.nodes[index], "no word from it")
    job.join(-1)
    back(job, 1, RankState.READY, RankState.READY)
    assert job.outcome is None
    job.ready(0, 1)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_a_rank_that_is_ready_while_a_node_is_missing_ends_no_job() -> None:
    job = Job(nnodes=3).begin()
    for index in (0, 1):
        job.lose(job.coordinator.nodes[index], "no word from it")
    job.join(-1)  # its ranks wait until the other node is here, too
    job.ready(4, 5)
    assert job.outcome is None
    job.join(-1)
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1, 1]


def test_a_job_that_had_not_begun_begins() -> None:
    job = Job()
    standing(job, 0, RankState.READY, RankState.STARTING, generation=-1, incarnation=0)
    standing(job, 1, RankState.READY, RankState.READY, generation=-1, incarnation=0)
    assert (job.take(Spawn), job.take(FaultNotice)) == ([], [])
    job.ready(1)
    assert [begin.generation for _, begin in job.take(Begin)] == [0, 0]


STATE = st.sampled_from([state for state in RankState if state is not RankState.FINISHED])


@settings(max_examples=150)
@given(st.lists(STATE, min_size=4, max_size=4), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.booleans())
def test_whatever_the_ranks_did_they_are_left_alone_or_regrouped(
    states: list[RankState], generations: tuple[int, int], held: bool
) -> None:
    job = Job()
    job.opens = not held
    for index in (0, 1):
        standing(job, index, *states[NPROC * index :][:NPROC], generation=generations[index])
    assert job.outcome is None
    if set(states) <= {RUNNING, DONE} and generations[0] == generations[1]:
        assert (job.take(FaultNotice), job.stores) == ([], [])
        assert bool(job.take(AllDone)) == (set(states) == {DONE})
        return
    assert {interrupt.generation for _, interrupt in job.take(FaultNotice)} == {max(generations)}
    waiting = [rank for rank in job.ranks if states[rank] not in (RankState.READY, RankState.GONE)]
    job.ready(*waiting)
    job.opens = True
    job.open_stores()
    spawned = [spawn.rank for _, spawn in job.take(Spawn)]
    assert spawned == [rank for rank in job.ranks if states[rank] is RankState.GONE]
    job.ready(*spawned)
    assert {begin.generation for _, begin in job.take(Begin)} == {max(generations) + 1}


LIVING = [state for state in RankState if state is not RankState.FINISHED]


@settings(max_examples=300)
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
        if others_ready and job.coordinator.phase is not Phase.RUNNING:
            job.ready(0, 1)
        job.sent.clear()
        back(job, 1, *states)
        if job.coordinator.generation == 1:
            break
    assert job.outcome is None
    assert job.take(Discard) == []
    if job.coordinator.generation == 0:
        if job.coordinator.phase is Phase.RUNNING:
            assert set(states) <= {RUNNING, DONE, RankState.STARTING, RankState.LEAVING}
            job.raises(0)
        job.ready(*(rank.number for rank in job.coordinator.ranks if rank.state is not RankState.READY))
    assert {begin.generation for _, begin in job.take(Begin)} == {1}
    for rank, state in zip((2, 3), states, strict=True):
        assert (job.coordinator.ranks[rank].incarnation == 0) == (state is not RankState.GONE)
    assert {job.coordinator.ranks[rank].incarnation for rank in (0, 1)} == {0}


@given(st.sampled_from(RankState), st.sampled_from(RankState))
def test_two_views_of_a_rank_meet(known: RankState, said: RankState) -> None:
    found = reunite(known, said)
    assert (found in (Reunion.ENDED, Reunion.START)) == (said is RankState.GONE is not known)
    assert (found is Reunion.INTERRUPT) <= (known in (RankState.LEAVING, RankState.STARTING))
    assert reunite(assumed(said), said) in (Reunion.AGREED, Reunion.INTERRUPT, Reunion.READY)
