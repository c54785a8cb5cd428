"""Test a coordinator that finds the ranks of its job running."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.job import Phase
from checkpointless.launcher.protocol.causes import CauseKind
from checkpointless.launcher.protocol.messages import (
    FaultNotice,
    Finish,
    Go,
    RankEnded,
    RankState,
    Spawn,
)
from tests.drawn import examples
from tests.unit.coordinator.nodes.standings import standing
from tests.unit.messaged_job import NPROC, REGROUP_S, Job, trouble

RUNNING, DONE = RankState.RUNNING, RankState.DONE


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
    assert [(begin.generation, begin.high_water) for _, begin in job.take(Go)] == [(4, 8), (4, 8)]


def test_an_exception_that_nobody_heard_of_is_handled() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    standing(job, 0, RUNNING, RUNNING, before=trouble(1, CauseKind.EXCEPTION, generation=3))
    assert job.said[1] == "incident 3: rank 1 raised ValueError at step 4: no; recovering"
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Go)] == [4, 4]


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


def test_a_node_that_is_nowhere_ends_the_job_in_time() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    job.tick(10.5)
    assert "no spare is ready" in job.said[-1]
    job.tick(REGROUP_S + 1)
    assert job.last_word == "node 0 did not join the job within 30 s"


def test_a_finished_rank_that_failed_in_between_is_no_success() -> None:
    job = Job()
    standing(job, 1, RankState.GONE, RankState.GONE, finished=True)
    job.hear(job.coordinator.nodes[1], RankEnded(3, 1, 3, False, 7, 8, "rank-3.log", []))
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
        assert (job.take(FaultNotice), job.stores) == ([], [])
        assert bool(job.take(Finish)) == (set(states) == {DONE})
        return
    assert {interrupt.generation for _, interrupt in job.take(FaultNotice)} == {max(generations)}
    waiting = [rank for rank in job.ranks if states[rank] not in (RankState.READY, RankState.GONE)]
    job.ready(*waiting)
    job.opens = True
    job.open_stores()
    spawned = [spawn.rank for _, spawn in job.take(Spawn)]
    assert spawned == [rank for rank in job.ranks if states[rank] is RankState.GONE]
    job.ready(*spawned)
    assert {begin.generation for _, begin in job.take(Go)} == {max(generations) + 1}


def test_a_node_that_goes_away_from_a_new_coordinator_keeps_its_place_for_a_while() -> None:
    job = Job(nnodes=3)
    standing(job, 0, RUNNING, RUNNING)
    node = standing(job, 1, RUNNING, RUNNING)
    job.join(-1)
    job.lose(node, "it closed the connection")
    job.tick(9.0)
    job.join(-1)
    assert job.take(Spawn) == []
    standing(job, 1, RUNNING, RUNNING)
    standing(job, 2, RUNNING, RUNNING)
    assert (job.sent, job.coordinator.job.phase) == ([], Phase.RUNNING)


def test_a_node_lost_with_the_coordinator_before_its_ranks_had_ended_is_no_success() -> None:
    job = Job()
    standing(job, 1, RankState.FINISHED, RankState.FINISHED, finished=True)
    job.join(0)
    assert job.last_word == "node 0 was lost before its ranks had ended (as was the coordinator)"
