"""Test a coordinator to which nodes come with ranks that run already: all to a new one, or one that was away."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.job import Node, Phase
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import CauseKind
from checkpointless.launcher.protocol.messages import Discard, FaultNotice, Joined, RankEnded, RankState, Searching
from tests.drawn import examples
from tests.unit.messaged_job import NPROC, REGROUP_S, Job, trouble

RUNNING, DONE, READY, GONE = RankState.RUNNING, RankState.DONE, RankState.READY, RankState.GONE


def standing(
    job: Job,
    index: int,
    *states: RankState,
    generation: int = 3,
    finished: bool = False,
    incarnation: int = 1,
    before: messages.NodeMessage | None = None,
    run_id: str = "the run",
) -> Node:
    """Have a node say what its ranks were doing while there was no coordinator."""
    node = job.admit(index)
    if before is not None:
        job.hear(node, before)
    first = index * NPROC
    ranks = [
        messages.RankStanding(first + at, incarnation, state, 7 + at, 8 + at) for at, state in enumerate(states)
    ]
    job.hear(node, messages.Standing(generation, 2, 6, run_id, finished, ranks))
    return node


def back(job: Job, index: int, *states: RankState, **more: Any) -> Node:
    """Bring a node back to the coordinator that began generation 0 of a job with it."""
    return standing(job, index, *states, **{"generation": 0, "incarnation": 0, "run_id": job.run_id, **more})


def goes_searching(job: Job) -> None:
    """Have node 1 lose sight of the coordinator, and say so."""
    node = job.coordinator.nodes[1]
    job.hear(node, Searching())
    job.lose(node, "it closed the connection")


@pytest.fixture
def half() -> Job:
    """Provide a job to whose new coordinator node 1 has come, with ranks that train."""
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    return job


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
    spawned = [(each.generation, each.env["TORCHELASTIC_RUN_ID"]) for _, each in job.take(messages.Spawn)]
    assert (job.started(), spawned) == ([(1, 2)], [(4, "the run")])
    job.ready(*job.ranks, committed=8, making=9)
    assert [(begin.generation, begin.high_water) for _, begin in job.take(messages.Go)] == [(4, 8), (4, 8)]


def test_an_exception_that_nobody_heard_of_is_handled(half: Job) -> None:
    standing(half, 0, RUNNING, RUNNING, before=trouble(1, CauseKind.EXCEPTION, generation=3))
    assert half.said[1] == "incident 3: rank 1 raised ValueError at step 4: no; recovering"
    half.ready(*half.ranks)
    assert half.begun() == [4, 4]


def test_a_node_that_was_lost_with_the_coordinator_is_replaced(half: Job) -> None:
    half.join(0)
    assert half.said[1] == "incident 3: node 0 was lost at step 9: as was the coordinator; recovering"
    assert (half.started(), half.stores) == ([(0, 2), (1, 2)], [(4, 0)])


def test_a_spare_takes_the_place_of_a_node_that_does_not_find_the_new_coordinator(half: Job) -> None:
    half.join(-1)
    half.tick(9.0)
    assert half.started() == []
    half.tick(10.5)
    assert "a spare takes the place of node 0" in half.said
    assert half.started() == [(0, 2), (1, 2)]


def test_a_node_that_is_nowhere_ends_the_job_in_time(half: Job) -> None:
    half.tick(10.5)
    assert "no spare is ready" in half.said[-1]
    half.tick(REGROUP_S + 1)
    assert half.last_word == "node 0 did not join the job within 30 s"


def test_a_finished_rank_that_failed_in_between_is_no_success() -> None:
    job = Job()
    node = standing(job, 1, GONE, GONE, finished=True)
    job.hear(node, RankEnded(3, False, "rank-3.log", [], rank=3, incarnation=1))
    standing(job, 0, DONE, DONE)
    assert job.last_word == "rank 3 exited with code 3"


STATE = st.sampled_from([state for state in RankState if state is not RankState.FINISHED])


@examples(150)
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
        assert (job.take(FaultNotice), job.stores, bool(job.take(messages.Finish))) == (
            [],
            [],
            set(states) == {DONE},
        )
        return
    assert {interrupt.generation for _, interrupt in job.take(FaultNotice)} == {max(generations)}
    waiting = [rank for rank in job.ranks if states[rank] not in (READY, GONE)]
    job.ready(*waiting)
    job.opens_again()
    spawned = [rank for rank, _ in job.started()]
    assert spawned == [rank for rank in job.ranks if states[rank] is GONE]
    job.ready(*spawned)
    assert set(job.begun()) == {max(generations) + 1}


def test_a_node_that_goes_away_from_a_new_coordinator_keeps_its_place_for_a_while() -> None:
    job = Job(nnodes=3)
    standing(job, 0, RUNNING, RUNNING)
    node = standing(job, 1, RUNNING, RUNNING)
    job.join(-1)
    job.lose(node, "it closed the connection")
    job.tick(9.0)
    job.join(-1)
    assert job.started() == []
    standing(job, 1, RUNNING, RUNNING)
    standing(job, 2, RUNNING, RUNNING)
    assert (job.sent, job.coordinator.job.phase) == ([], Phase.RUNNING)


def test_a_node_lost_with_the_coordinator_before_its_ranks_had_ended_is_no_success() -> None:
    job = Job()
    standing(job, 1, RankState.FINISHED, RankState.FINISHED, finished=True)
    job.join(0)
    assert job.last_word == "node 0 was lost before its ranks had ended (as was the coordinator)"


@pytest.mark.parametrize("more", [{"generation": 1}, {"run_id": "another"}, {"finished": True}])
def test_a_node_that_comes_back_from_elsewhere_has_to_end_its_ranks_first(job: Job, more: dict[str, Any]) -> None:
    job.lose(job.coordinator.nodes[1], "no word from it for 10 s")
    node = back(job, 1, RUNNING, RUNNING, **more)
    assert job.take(Discard) == [(1, Discard())]
    job.ready(2, 3)  # these were under way when it was told
    job.ready(0, 1)
    assert (job.begun(), job.started()) == ([], [])
    job.hear(node, Joined())
    assert job.started() == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert job.begun() == [1, 1]


def test_a_node_that_lost_sight_of_the_coordinator_comes_back_and_nobody_is_told(job: Job) -> None:
    goes_searching(job)
    job.tick(5.0)
    assert job.sent == []
    back(job, 1, RUNNING, RUNNING)
    assert (job.sent, job.said) == ([], ["node 1 is back with its ranks, and nobody had missed it"])
    job.tick(60.0)
    job.ends(3)
    assert job.started() == [(3, 1)]


def test_a_node_that_is_back_and_says_nothing_is_not_waited_for_without_end(job: Job) -> None:
    job.raises(0)
    job.ready(1, 2, 3)
    goes_searching(job)
    job.admit(1)
    job.ready(0)
    for late_s, is_said in ((-1, False), (1, True)):
        job.tick(REGROUP_S + late_s)
        assert ("it came back and did not say what its ranks do" in " ".join(job.said)) is is_said
    assert job.outcome is None  # there is time for another node
    job.hear(job.coordinator.nodes[1], Joined())
    assert job.started() == [(2, 1), (3, 1)]
    job.ready(*job.ranks)
    assert job.begun() == [1, 1]


@pytest.mark.parametrize("searching", [True, False])
def test_ranks_that_did_not_hear_that_a_generation_began_are_kept(job: Job, searching: bool) -> None:
    job.raises(0)
    job.ready(*job.ranks)
    node = job.coordinator.nodes[1]
    if searching:
        job.hear(node, Searching())
    job.lose(node, "it closed the connection before the command arrived")
    job.sent.clear()
    back(job, 1, READY, READY)
    assert (job.take(Discard), job.started()) == ([], [])
    assert [notice.generation for to, notice in job.take(FaultNotice) if to == 0] == [1] * searching
    words = "node 1 did not hear that generation 1 began" if searching else "node 1 was lost"
    assert any(words in line for line in job.said)
    job.ready(0, 1)
    assert job.begun() == [2, 2]


def test_a_node_that_is_lost_before_it_has_spoken_is_not_waited_for_twice(job: Job) -> None:
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


def test_ranks_that_missed_several_generations_are_kept_and_those_of_an_earlier_holder_are_not(job: Job) -> None:
    for _ in range(2):
        job.raises(0)
        job.ready(0, 1)
        for rank in (2, 3):
            if job.coordinator.ranks[rank].state is not READY:
                job.ready(rank)
        goes_searching(job)
        job.sent.clear()
        back(job, 1, READY, READY)
        assert job.take(Discard) == []
    assert job.coordinator.job.generation == 2
    job.lose(job.coordinator.nodes[1], "no word from it")
    job.lose(job.join(1), "another machine, which is lost, too")
    job.sent.clear()
    back(job, 1, READY, READY)
    assert job.take(Discard) == [(1, Discard())]


@examples(150)
@given(st.lists(STATE, min_size=2, max_size=2), *[st.booleans()] * 3, st.sampled_from([None, 1, 2]))
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
    assert (job.outcome, job.take(Discard)) == (None, [])
    if job.coordinator.job.generation == 0:
        if job.coordinator.job.phase is Phase.RUNNING:
            assert set(states) <= {RUNNING, DONE, RankState.STARTING, RankState.LEAVING}
            job.raises(0)
        job.ready(*(rank.number for rank in job.coordinator.ranks if rank.state is not READY))
    assert set(job.begun()) == {1}
    for rank, state in zip((2, 3), states, strict=True):
        assert (job.coordinator.ranks[rank].incarnation == 0) == (state is not GONE)
    assert {job.coordinator.ranks[rank].incarnation for rank in (0, 1)} == {0}


def test_a_rank_that_failed_after_its_block_while_its_node_was_away_fails_the_job(job: Job) -> None:
    job.returns()
    goes_searching(job)
    failed = RankEnded(1, False, "rank-2.log", ["it could not save"], rank=2, incarnation=0, committed=3, making=4)
    back(job, 1, GONE, RankState.FINISHED, before=failed, finished=True)
    assert job.last_word == "rank 2 exited with code 1; its log: rank-2.log"


def test_a_rank_that_waits_for_the_next_block_and_dies_unheard_is_replaced(job: Job) -> None:
    job.returns()
    job.ready(1, 2, 3)
    goes_searching(job)
    back(job, 1, GONE, READY, finished=True)
    assert job.started() == [(2, 1)]
    job.ready(0, 2)
    assert job.begun() == [1, 1]
