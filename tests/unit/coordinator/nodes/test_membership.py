"""Test that nodes come, are lost and are replaced, that one has the store, and what bad devices lead to."""

from __future__ import annotations

import pytest

from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.messages import DeviceBad, End, FaultNotice, Go, Holding, Kill, Leaving, Spawn
from tests.unit.messaged_job import HEARTBEAT_S, REGROUP_S, Job, at_barrier, go_env


def test_a_spare_takes_the_place_of_a_lost_node(job: Job) -> None:
    spare = job.join(-1)
    assert job.sent == []
    lost = job.coordinator.nodes[1]
    job.lose(lost, "it closed the connection")
    cause = "node 1 was lost: it closed the connection"
    assert job.take(FaultNotice) == [(0, FaultNotice(0, "1", cause, None))]
    assert [(node, spawn.rank, spawn.incarnation) for node, spawn in job.take(Spawn)] == [(1, 2, 1), (1, 3, 1)]
    assert job.coordinator.nodes[1] is spare
    assert job.coordinator.spares == []
    with pytest.raises(ValueError, match="which it does not run"):
        job.hear(lost, at_barrier(2, 1, -1, -1))
    job.ready(*job.ranks)
    assert ([node for node, _ in job.take(Go)], job.said[1]) == ([0, 1], "a spare takes the place of node 1")


@pytest.mark.parametrize("index", [1, -1])
def test_without_a_spare_another_node_may_come_in_time(job: Job, index: int) -> None:
    job.lose(job.coordinator.nodes[1], "it is gone")
    assert job.said[-1] == "no spare is ready: waiting up to 30 s for another node 1"
    job.ready(0, 1)
    assert (job.begun(), job.started()) == ([], [])
    job.join(index)
    assert job.started() == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert [node for node, _ in job.take(Go)] == [0, 1]


def test_a_node_that_is_lost_before_the_job_began_may_come_back() -> None:
    job = Job()
    job.lose(job.join(1), "it is gone")
    assert job.said[0] == "node 1 was lost before the job began (it is gone)"
    assert "waiting up to 600 s for another node 1" in job.said[1]
    job.join(0)
    assert job.sent == []
    job.join(1)
    assert job.started() == [(rank, 0) for rank in job.ranks]


def test_a_node_whose_processes_have_ended_well_is_not_missed(job: Job) -> None:
    job.returns()
    job.ends(2, 0)
    job.ends(3, 0)
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.ends(0, 0)
    assert job.outcome is None
    job.ends(1, 0)
    assert job.outcome == End(0, [])


def test_a_node_lost_before_its_processes_have_ended_is_no_success(job: Job) -> None:
    job.returns()
    job.ends(2, 0)
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.tick(9.9)
    assert job.outcome is None  # it may come back, and say how they ended
    job.tick(10.1)
    why = "it lost sight of the coordinator and did not come back"
    assert job.last_word == f"node 1 was lost before its ranks had ended ({why})"


def test_a_replacement_that_still_imports_is_waited_for(job: Job) -> None:
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.ready(0)
    node = job.admit(1)
    job.ready(1)
    assert job.outcome is None
    job.tick(REGROUP_S + 0.1)
    assert (job.outcome, job.take(Kill)) == (None, [])
    job.hear(node, messages.Joined())
    assert job.started() == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert [index for index, _ in job.take(Go)] == [0, 1]


def test_a_replacement_that_is_lost_before_its_ranks_were_started_is_replaced_by_a_spare(job: Job) -> None:
    job.lose(job.coordinator.nodes[1], "it is gone")
    replacement = job.admit(1)
    job.join(-1)
    job.lose(replacement, "gone as well")
    assert job.started() == [(2, 1), (3, 1)]


def test_a_node_that_leaves_is_lost_once_and_not_again_when_its_connection_closes(job: Job) -> None:
    job.hear(job.coordinator.nodes[1], Leaving("stopped by SIGTERM"))
    said = list(job.said)
    job.tick(REGROUP_S - 0.1)
    job.lose(job.coordinator.nodes[1], "it closed the connection")
    assert job.said == said
    job.tick(REGROUP_S + 0.1)
    assert "node 1 was lost (stopped by SIGTERM)" in job.last_word


def test_a_node_that_is_told_to_stop_is_replaced_but_not_the_coordinators(job: Job) -> None:
    job.coordinator.job.host = job.coordinator.nodes[0]
    job.join(-1)
    job.hear(job.coordinator.nodes[1], Leaving("stopped by SIGTERM"))
    assert job.started() == [(2, 1), (3, 1)]
    job.hear(job.coordinator.nodes[0], Leaving("stopped by SIGTERM"))
    assert job.last_word == "stopped by SIGTERM"


def test_nodes_that_never_join_end_the_job_by_name() -> None:
    job = Job(nnodes=3)
    job.join(1)
    job.tick(600.1)
    assert job.last_word == "node 0, 2 did not join the job within 600 s"


# ---- stores


def test_nobody_is_started_and_nothing_begins_before_the_store_is_there() -> None:
    job = Job()
    job.opens = False
    job.join(1)
    job.join(0)
    assert (job.stores, job.sent) == ([(0, 0)], [])
    job.hear(job.coordinator.nodes[1], messages.StoreOpened(0, "10.0.0.9", 1))
    assert job.sent == []
    job.opens_again()
    assert {spawn.env["MASTER_ADDR"] for _, spawn in job.take(Spawn)} == {"10.0.0.0"}
    job.ready(*job.ranks)
    job.raises(0)
    job.opens = False
    job.raises(1)
    job.ready(*job.ranks)
    job.sent.clear()
    job.raises(2, generation=1)
    job.ready(*job.ranks)
    assert job.begun() == []
    job.opens_again()
    assert [begin.env for _, begin in job.take(Go)] == [go_env(2), go_env(2)]


def test_the_store_moves_to_another_node_when_its_own_is_lost(job: Job) -> None:
    job.join(-1)
    job.lose(job.coordinator.nodes[0], "it is gone")
    assert job.stores[1:] == [(1, 1)]
    job.ready(*job.ranks)
    assert [begin.env for _, begin in job.take(Go)] == [go_env(1, host=1)] * 2
    job.opens = False
    job.raises(3)
    job.lose(job.coordinator.nodes[0], "it is gone, too")
    assert job.stores[2:] == [(2, 0), (2, 1)]
    job.join(0)
    job.opens_again()
    job.ready(*job.ranks)
    assert [begin.env for _, begin in job.take(Go)][2:] == [go_env(2, host=1)] * 2


def test_a_node_that_opens_no_store_ends_the_job_in_time(job: Job) -> None:
    job.opens = False
    job.raises(0)
    job.ready(*job.ranks)
    job.tick(REGROUP_S + 1)
    assert job.last_word == "node 0 opened no store for generation 1 in time"


def test_a_node_that_is_looked_for_while_all_ranks_are_ready_is_waited_for() -> None:
    job = Job().join_all()
    away = job.coordinator.nodes[1]
    job.ready(0, 1, 2)
    job.later_s += HEARTBEAT_S / 2
    job.hear(away, messages.Searching())
    job.lose(away, "it said that it searches")
    job.ready(3)
    assert job.begun() == []
    job.tick(after_s=HEARTBEAT_S / 2 + 1)
    assert (job.outcome, job.take(Kill)) == (None, [])


WHY = "the device check exited with 1: no"


def bad(job: Job, rank: int) -> None:
    job.tell(rank, DeviceBad(rank, job.coordinator.ranks[rank].incarnation, WHY))


def spawns(job: Job) -> list[tuple[int, int, int, bool]]:
    return [(node, each.rank, each.incarnation, each.anyway) for node, each in job.take(Spawn)]


def test_without_a_spare_the_device_is_tried_until_the_limits_of_every_job_are_reached(job: Job) -> None:
    for tries in range(1, 10):
        job.ends(2)
        if job.outcome is None:
            job.sent.clear()
            bad(job, 2)
            assert spawns(job) == [(1, 2, tries, True)]
            assert f"rank 2 is started on it {'once more' if tries == 1 else 'again: add a spare'}" in job.said[-1]
            job.ready(*job.ranks, committed=3)
        else:
            break
    assert tries > 3
    assert "in a row" in job.last_word


def test_the_node_that_hosts_the_coordinator_is_not_given_up(job: Job) -> None:
    job.coordinator.job.host = job.coordinator.nodes[0]
    job.join(-1)
    job.ends(0)
    job.sent.clear()
    bad(job, 0)
    assert (spawns(job), job.outcome) == ([(0, 0, 1, True)], None)


@pytest.mark.parametrize(("shards", "is_given_up"), [((0, 1, 0, 1), True), ((0, 0, 2, 2), False)])
def test_a_node_with_the_only_holders_of_a_shard_is_tried_first(shards: tuple[int, ...], is_given_up: bool) -> None:
    job = Job().begin()
    job.join(-1)
    job.progress(4)
    for index in (0, 1):
        job.hear(job.coordinator.nodes[index], Holding(list(shards[2 * index : 2 * index + 2])))
    job.ends(2)
    job.sent.clear()
    node = job.coordinator.nodes[1]
    bad(job, 2)
    assert bool(job.take(End)) is is_given_up
    if is_given_up:
        job.sent.clear()
        job.hear(node, DeviceBad(2, 2, WHY))  # it is no part of the job any more
    assert spawns(job) == ([] if is_given_up else [(1, 2, 1, True)])


def test_a_report_of_an_earlier_process_is_ignored(job: Job) -> None:
    job.join(-1)
    job.ends(2)
    job.sent.clear()
    job.tell(2, DeviceBad(2, 0, WHY))
    job.tell(3, DeviceBad(3, 0, WHY))  # its process lives
    assert job.sent == []


def test_a_device_that_has_worked_since_is_tried_again(job: Job) -> None:
    for step in (5, 6, 7):
        job.ends(2)
        job.sent.clear()
        bad(job, 2)
        assert spawns(job) == [(1, 2, job.coordinator.ranks[2].incarnation, True)]
        job.ready(*job.ranks)
        job.progress(step)
    assert job.outcome is None


def test_a_report_that_is_repeated_gets_the_same_answer_because_it_may_be_lost(job: Job) -> None:
    job.ends(2)
    job.sent.clear()
    job.join(-1)
    job.hear(job.coordinator.nodes[0], Holding([0, 1]))
    job.hear(job.coordinator.nodes[1], Holding([2, 3]))
    job.coordinator.job.fresh.clear()  # rank 3 is the only one with what it holds
    for _ in range(3):
        bad(job, 2)
    assert (spawns(job), job.outcome, job.take(End)) == ([(1, 2, 1, True)] * 3, None, [])


def test_a_process_that_was_never_started_is_not_stillborn(job: Job) -> None:
    job.raises(0)
    for number in range(8):
        job.ends(2, forgiven=number > 0, was_started=number == 0)
    assert job.outcome is None


def test_the_device_is_tried_when_there_is_a_store_again(job: Job) -> None:
    job.ends(2)
    job.opens = False
    job.lose(job.coordinator.nodes[0], "it hosts the store")
    job.sent.clear()
    bad(job, 2)
    assert spawns(job) == []
    job.opens_again()
    assert (1, 2, 1, True) in spawns(job)
