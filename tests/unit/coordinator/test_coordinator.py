"""What the coordinator makes of what ranks do, and of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointless.coordinator.hangs import Heartbeat
from checkpointless.coordinator.incident_policy import STILLBORN_LIMIT
from checkpointless.coordinator.roster import JobProgress
from checkpointless.telemetry.events import read_events
from checkpointless.wire.causes import CauseKind
from checkpointless.wire.node_messages import (
    Alive,
    AllDone,
    Answered,
    Ask,
    Begin,
    End,
    Interrupt,
    JobOver,
    Joined,
    Kill,
    NodeMessage,
    Progress,
    RankDone,
    RankReady,
    Silent,
    Spawn,
)
from checkpointless.wire.rank_state import RankState
from tests.unit.messaged_job import HEARTBEAT_S, NPROC, REGROUP_S, Job, go_env


def test_processes_are_asked_for_when_every_node_has_joined() -> None:
    job = Job(nnodes=3)
    job.join(0)
    job.join(2)
    job.admit(1)
    assert job.sent == []
    job.hear(job.coordinator.nodes[1], Joined())
    spawned = job.take(Spawn)
    assert [(node, spawn.rank) for node, spawn in spawned] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert {(spawn.incarnation, spawn.generation, spawn.incident) for _, spawn in spawned} == {(0, 0, "")}
    assert spawned[3][1].env["RANK"] == "3"
    assert spawned[3][1].env["GROUP_RANK"] == "1"


def test_a_generation_begins_when_every_rank_is_ready_and_not_before() -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    job.ready(3, 0, 2)
    assert job.take(Begin) == []
    job.ready(1)
    begin = Begin(0, "", go_env(0), -1, -1)
    assert job.take(Begin) == [(0, begin), (1, begin)]
    assert job.coordinator.generation == 0


def test_a_node_that_joins_twice_is_refused() -> None:
    job = Job()
    job.join(0)
    with pytest.raises(ValueError, match="node 0 is here already"):
        job.admit(0)


def test_a_node_that_does_not_fit_is_refused() -> None:
    job = Job()
    with pytest.raises(ValueError, match="it runs 3 ranks, and the nodes of this job run 2"):
        job.admit(0, nproc=3)
    with pytest.raises(ValueError, match="there is no node 2 in a job of 2"):
        job.admit(2)
    job.coordinator.end(0)
    with pytest.raises(ValueError, match="the job is over"):
        job.admit(0)


def test_a_node_may_not_speak_of_ranks_that_it_does_not_run() -> None:
    job = Job().begin()
    with pytest.raises(ValueError, match="node 0 speaks of rank 2, which it does not run"):
        job.hear(job.coordinator.nodes[0], RankDone(2, 0))


def test_ranks_that_never_enter_are_replaced_once_and_then_end_the_job() -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    job.ready(0, 2)
    job.tick(HEARTBEAT_S - 1)
    assert job.outcome is None
    job.tick(HEARTBEAT_S + 1)
    assert "rank 1 did not enter the block within 10 s after the first rank did" in job.said[0]
    assert job.take(Kill) == [(0, Kill(1, 0, -1)), (1, Kill(3, 0, -1))]
    job.ends(1, forgiven=True)
    job.ends(3, forgiven=True)
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)][-2:] == [(1, 1), (3, 1)]
    job.ready(1)
    job.tick(2 * HEARTBEAT_S + 2)
    assert job.last_word == "rank 3 did not enter the block within 10 s, also not as a new process"


def test_a_rank_that_is_replaced_before_it_entered_begins_with_the_others() -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    job.ready(0, 1, 2)
    job.tick(HEARTBEAT_S + 1)
    job.ends(3, forgiven=True)
    job.ready(3)
    assert [begin.generation for _, begin in job.take(Begin)] == [0, 0]


# ---- the end


def test_all_done_and_gone_is_a_good_end() -> None:
    job = Job().begin()
    for rank in job.ranks:
        assert job.take(AllDone) == []
        job.tell(rank, RankDone(rank, 0))
    assert [node for node, _ in job.take(AllDone)] == [0, 1]
    for rank in job.ranks:
        assert job.outcome is None
        job.ends(rank, 0)
    assert job.outcome == End(0, [])
    assert job.take(End) == [(0, End(0, [])), (1, End(0, []))]


def test_ranks_that_end_without_ever_entering_are_a_good_end_too() -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    for rank in job.ranks:
        job.ends(rank, 0)
    assert job.outcome == End(0, [])


@pytest.mark.parametrize("ready_first", [True, False])
def test_a_rank_that_ends_while_another_waits_for_it(ready_first: bool) -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    if ready_first:
        job.ready(2)
        job.ends(1, 0)
    else:
        job.ends(1, 0)
        job.ready(2)
    assert job.last_word == "rank 1 ended without entering the block that rank 2 waits in"


def test_a_first_process_that_fails_before_it_entered_ends_the_job() -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    job.ends(1, 3)
    assert job.outcome == End(1, ["its last line", "rank 1 exited with code 3; its log: rank-1.log"])


def test_a_node_that_gives_up_ends_the_job_everywhere() -> None:
    job = Job().begin()
    spare = job.join(-1)
    job.hear(job.coordinator.nodes[1], JobOver("stopped by SIGTERM"))
    assert job.last_word == "stopped by SIGTERM"
    assert [node for node, _ in job.take(End)] == [0, 1, spare.index]
    job.sent.clear()
    job.raises(0)
    job.ends(0)
    job.tick(1000)
    job.coordinator.end(0)
    assert job.sent == []


def test_finished_ranks_may_enter_again() -> None:
    job = Job().begin()
    for rank in job.ranks:
        job.tell(rank, RankDone(rank, 0))
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


# ---- faults


def test_an_exception_interrupts_all_and_the_next_generation_begins_with_all() -> None:
    job = Job().begin()
    job.raises(2)
    interrupt = Interrupt(0, "1", "rank 2 raised ValueError at step 4: no", 2)
    assert job.take(Interrupt) == [(0, interrupt), (1, interrupt)]
    assert job.stores == [(0, 0), (1, 0)]
    job.ready(0, 1, 3, committed=4, making=5)
    assert job.take(Begin) == []
    job.ready(2, committed=3, making=4)
    begin = Begin(1, "1", go_env(1), high_water=4, target=5)
    assert job.take(Begin) == [(0, begin), (1, begin)]
    assert job.take(Spawn) == []
    assert job.said == ["incident 1: rank 2 raised ValueError at step 4: no; recovering"]


def test_a_process_that_dies_is_replaced_alone() -> None:
    job = Job().begin()
    job.ends(2)
    assert [interrupt.culprit for _, interrupt in job.take(Interrupt)] == [2, 2]
    ((node, spawn),) = job.take(Spawn)
    assert (node, spawn.rank, spawn.incarnation, spawn.generation, spawn.incident) == (1, 2, 1, 1, "1")
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_the_first_of_the_strongest_causes_is_told_and_a_victim_only_in_want_of_another() -> None:
    job = Job().begin()
    job.raises(0, CauseKind.VICTIM)
    assert [interrupt.culprit for _, interrupt in job.take(Interrupt)] == [-1, -1]
    assert job.said == []
    job.raises(1, what="raised KeyError")
    job.raises(2, what="raised OSError")
    job.ends(3)
    job.raises(0, CauseKind.VICTIM)
    assert len(job.take(Interrupt)) == 2
    job.ready(*job.ranks)
    assert job.said == [
        "incident 1: rank 1 raised KeyError at step 4: no; recovering",
        "incident 1: rank 3 killed by SIGKILL at step 4; recovering",
    ]
    job.raises(0, CauseKind.VICTIM, generation=1)
    job.ready(*job.ranks)
    assert job.said[2:] == ["incident 2: rank 0 raised ValueError at step 4: no; recovering"]


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
    for node in job.coordinator.nodes:
        job.hear(node, Progress(0, 0, 1, 0))
    ups = [event for event in read_events(tmp_path) if event.stage == "rung"]
    assert [(up.incident, up.fields["rung"], up.fields["why"]) for up in ups] == [
        ("2", "process", "rank 1 killed by SIGKILL at step 4"),
        ("2", "node", "node 1 was lost at step 4: it closed the connection"),
        ("2", "job", "storage brought step 0 back; step 3 had been committed"),
    ]
    assert job.said[-1] == "incident 2: storage brought step 0 back; step 3 had been committed"


def test_a_rank_at_the_barrier_of_a_running_generation_has_left_it() -> None:
    job = Job().begin()
    job.ready(1)
    assert [interrupt.cause for _, interrupt in job.take(Interrupt)] == ["rank 1 left the block"] * 2
    job.ready(0, 2, 3)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_what_is_stale_is_ignored() -> None:
    job = Job().begin()
    job.ends(2)
    job.ready(*job.ranks)
    job.sent.clear()
    job.said.clear()
    job.raises(0, generation=0)
    job.tell(0, RankDone(0, 0))
    job.ends(2, incarnation=0)
    job.tell(2, RankReady(2, 0, 1, -1, -1))
    job.tell(0, Answered(1, 0, False, "of an inquiry that nobody made"))
    job.tell(0, Alive())
    assert {rank.state for rank in job.coordinator.ranks} == {RankState.RUNNING}
    assert (job.sent, job.said) == ([], [])


def test_a_fault_during_the_recovery_belongs_to_the_incident() -> None:
    job = Job().begin()
    job.raises(2)
    job.ready(0, 1, 2)
    job.ends(0)
    job.ready(3)
    assert job.take(Begin) == []
    job.ready(0)
    assert [(begin.generation, begin.incident) for _, begin in job.take(Begin)] == [(1, "1")] * 2


def test_successors_that_never_enter_end_the_job() -> None:
    job = Job().begin()
    job.ends(1)
    for _ in range(STILLBORN_LIMIT):
        assert job.outcome is None
        job.ends(1, 7)
    assert job.last_word.startswith("5 successors ended before they entered the block; the last: rank 1 exited")


def test_incidents_over_the_limit_end_the_job() -> None:
    job = Job(max_incidents=1).begin()
    job.raises(0)
    job.ready(*job.ranks, committed=4)
    job.raises(0, generation=1)
    job.ready(*job.ranks, committed=5)
    reason = "incident 2 is over the limit of 1: rank 0 raised ValueError at step 4: no"
    assert job.outcome == End(1, [reason, "Traceback"])


def test_ranks_that_are_late_are_killed_once_and_then_missed() -> None:
    job = Job().begin()
    job.raises(0)
    job.ready(0, 1, 2)
    job.tick(REGROUP_S + 1)
    assert job.take(Kill) == [(1, Kill(3, 0, 0))]
    job.ends(3, forgiven=True)
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [3]
    job.tick(2 * REGROUP_S + 2)
    assert job.last_word == "rank 3 did not come back within 30 s, also not as a new process"


# ---- progress


def test_recovered_is_said_when_every_node_has_made_the_lost_step() -> None:
    job = Job().begin()
    job.raises(0)
    job.ready(*job.ranks, committed=3, making=4)
    one, two = job.coordinator.nodes
    job.hear(one, Progress(4, 4, 5, 0))
    job.hear(two, Progress(3, 4, 5, 0))
    assert len(job.said) == 1
    job.hear(two, Progress(4, 4, 5, 0))
    assert job.said[1].startswith("incident 1: recovered in ")


def test_a_fall_back_to_storage_is_seen_when_every_node_is_behind() -> None:
    job = Job().begin()
    one, two = job.coordinator.nodes
    for node, step in ((one, 9), (two, 9), (one, 5), (two, 6)):
        job.hear(node, Progress(step, step, step + 1, 0))
    job.raises(0)
    job.ready(*job.ranks, committed=3)
    assert [begin.high_water for _, begin in job.take(Begin)] == [3, 3]


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9)))))
def test_job_progress_agrees_with_brute_force(said: Sequence[tuple[int, tuple[int, int] | None]]) -> None:
    progress, last = JobProgress(), dict[int, tuple[int, int]]()
    for node, steps in said:
        if steps is None:
            progress.drop(node)
            last.pop(node, None)
        else:
            progress.put(node, Progress(*steps, 10, 0))
            last[node] = steps
        assert len(progress) == len(last)
        if last:
            assert progress.oldest == min(oldest for oldest, _ in last.values())
            assert progress.newest == max(newest for _, newest in last.values())


# ---- hangs


def silence(job: Job, *ranks: int, beat: int = 7, age_s: float = HEARTBEAT_S + 0.1, letter: str = "S") -> None:
    for node in job.coordinator.nodes:
        mine = [rank for rank in ranks if rank // NPROC == node.index]
        job.hear(node, Silent([[rank, beat, int(1000 * age_s), 4, 0, ord(letter), 0] for rank in mine]))


def wait_in_silence(job: Job, *ranks: int, seconds: float = 6.0, letter: str = "S") -> None:
    """Time passes, in which these ranks stay where they are."""
    for _ in range(int(seconds)):
        job.later_s += 1.0
        silence(job, *ranks, age_s=HEARTBEAT_S + job.later_s, letter=letter)
        job.tick()


def test_who_waits_in_no_collective_is_asked_to_leave_and_replaced_if_it_does_not() -> None:
    job = Job(nnodes=3).begin()
    longest(job, 0)
    silence(job, 0, 4, 5)
    job.tick()
    assert job.take(Ask) == [(0, Ask(1, [[0]])), (2, Ask(1, [[4], [5]]))]
    job.tell(0, Answered(1, 0, True, "in a collective"))
    job.tell(4, Answered(1, 4, False, "elsewhere"))
    job.tick()
    assert job.take(Interrupt) == []
    job.tell(5, Answered(1, 5, True, "in a collective"))
    job.tick()
    cause = "rank 4 made no progress for 10 s at step 4"
    assert job.take(Interrupt) == [(node, Interrupt(0, "1", cause, 4)) for node in (0, 1, 2)]
    job.later_s = 4.9
    job.tick()
    assert job.take(Kill) == []
    job.later_s = 5.1
    job.tick()
    assert job.take(Kill) == [(2, Kill(4, 0, 0, 7))]
    job.ends(4, forgiven=True)
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1, 1]


def test_who_leaves_in_time_is_not_replaced() -> None:
    job = Job(nnodes=3).begin()
    longest(job, 0)
    silence(job, 4)
    job.tick()
    job.tell(4, Answered(1, 4, False, "elsewhere"))
    job.tick()
    job.ready(4)
    job.later_s = 20.0
    job.tick()
    assert job.take(Kill) == []
    job.ready(0, 1, 2, 3, 5)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1, 1]
    assert {rank.incarnation for rank in job.coordinator.ranks} == {0}


def test_who_does_not_answer_again_and_again_hangs() -> None:
    job = Job().begin()
    longest(job, 0)
    silence(job, 3)
    job.tick()
    wait_in_silence(job, 3, seconds=4)
    assert len(job.take(Ask)) >= 3
    assert job.take(Interrupt) == []
    wait_in_silence(job, 3, seconds=2)
    assert job.take(Kill) == [(1, Kill(3, 0, 0, 7))]


def test_an_answer_that_comes_late_counts() -> None:
    job = Job().begin()
    longest(job, 0)
    silence(job, 3)
    job.tick()
    wait_in_silence(job, 3, seconds=3)
    job.tell(3, Answered(1, 3, True, "in a collective"))
    wait_in_silence(job, 3, seconds=4)
    assert (job.take(Interrupt), job.take(Kill)) == ([], [])


@pytest.mark.parametrize("letter", ["R", "D", "t"])
def test_who_cannot_answer_is_waited_for(letter: str) -> None:
    job = Job().begin()
    longest(job, 0)
    wait_in_silence(job, 3, seconds=15, letter=letter)
    assert (job.take(Interrupt), job.take(Kill)) == ([], [])
    assert "rank 3 of 4 has made no progress" in job.said[0]
    wait_in_silence(job, 3, seconds=10, letter=letter)
    assert job.take(Kill) == [(1, Kill(3, 0, 0, 7))]


def test_a_node_that_has_not_spoken_of_its_ranks_since_does_not_accuse_them() -> None:
    job = Job().begin()
    longest(job, 0)
    silence(job, 3)
    job.tick()
    for _ in range(20):
        job.later_s += 1.0
        job.tick()
    assert (job.take(Interrupt), job.take(Kill)) == ([], [])


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 2), (2, 3)])
def test_a_stall_that_many_share_is_waited_for_and_told(ranks: tuple[int, ...]) -> None:
    job = Job(heartbeat=Heartbeat.of(None)).begin()
    longest(job, 1000)
    job.sent.clear()
    for age_s in range(28, 120):
        job.later_s += 1.0
        stall(job, ranks, age_s)
    assert (job.take(Interrupt), job.take(Kill)) == ([], [])
    told = [line for line in job.said if "made no progress" in line]
    assert 2 <= len(told) <= 3
    assert "read in data.py:31" in told[0]
    silence(job)
    job.tick()
    assert "is over after 119 s" in job.said[-1]


def test_a_shared_stall_beyond_the_ceiling_is_an_incident_in_which_nobody_is_killed() -> None:
    job = Job(heartbeat=Heartbeat.of(None)).begin()
    longest(job, 1000)
    for age_s in range(30, 610):
        job.later_s += 1.0
        stall(job, (0, 1, 2, 3), age_s)
    assert "incident 1: ranks 0, 1, 2, 3 made no progress for 600 s at step 4" in job.said[-1]
    assert len(job.take(Interrupt)) == 2
    assert job.take(Kill) == []
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def longest(job: Job, milliseconds: int) -> None:
    for node in job.coordinator.nodes:
        job.hear(node, Progress(3, 3, 4, milliseconds))


def stall(job: Job, ranks: Sequence[int], age_s: float) -> None:
    """Ranks in step 4 make no progress, and answer where they are; the others wait for them in a collective."""
    stack = 'File "/a/data.py", line 31, in read\n    file.read()\n'
    if job.coordinator.outcome is not None or not job.coordinator._running:
        return
    for node in job.coordinator.nodes:
        mine = [rank for rank in job.ranks if rank // NPROC == node.index]
        job.hear(node, Silent([[rank, 7, int(1000 * age_s), 4, 1, ord("S"), 0] for rank in mine]))
    job.tick()
    for _, ask in job.take(Ask):
        for (rank,) in ask.ranks:
            job.tell(rank, Answered(ask.id, rank, rank not in ranks, stack))
    job.tick()


def test_ranks_that_all_wait_for_each_other_leave_together_and_nobody_is_killed() -> None:
    job = Job().begin()
    silence(job, *job.ranks)
    job.tick()
    for rank in job.ranks:
        job.tell(rank, Answered(1, rank, True, "in a collective"))
    job.tick()
    cause = "ranks waited for each other with no progress for 10 s at step 4"
    assert job.take(Interrupt) == []  # nobody has ever shown progress
    longest(job, 0)
    wait_in_silence(job, *job.ranks, seconds=2)
    for rank in job.ranks:
        job.tell(rank, Answered(2, rank, True, "in a collective"))
    job.tick()
    assert job.take(Interrupt) == [(node, Interrupt(0, "1", cause, -1)) for node in (0, 1)]
    assert job.take(Kill) == []


@pytest.mark.parametrize("again", [(), (3,)])
def test_a_rank_that_moved_on_since_it_was_asked_is_left_alone(again: tuple[int, ...]) -> None:
    job = Job().begin()
    longest(job, 0)
    silence(job, 3)
    job.tick()
    silence(job, *again, beat=8, age_s=HEARTBEAT_S * 0.95)
    job.tell(3, Answered(1, 3, False, "elsewhere"))
    job.tick()
    assert (job.take(Interrupt), job.take(Kill)) == ([], [])


# ---- whatever comes

RANK = st.integers(0, 3)
EVENTS = st.one_of(
    st.tuples(st.just("all ready"), RANK),
    st.tuples(st.just("ready"), RANK, st.integers(0, 2), st.integers(-1, 5)),
    st.tuples(st.just("trouble"), RANK, st.integers(0, 1), st.sampled_from(CauseKind)),
    st.tuples(st.just("ended"), RANK, st.integers(0, 2), st.sampled_from([0, 0, 3, -9]), st.booleans()),
    st.tuples(st.just("done"), RANK, st.integers(0, 1)),
    st.tuples(st.just("all done"), RANK),
    st.tuples(st.just("progress"), RANK, st.integers(-1, 5), st.integers(0, 2)),
    st.tuples(st.just("silent"), RANK, st.integers(0, 2), st.sampled_from([0.5, 1.0, 3.0])),
    st.tuples(st.just("answered"), RANK, st.integers(1, 3), st.booleans()),
    st.tuples(st.just("joined"), RANK),
    st.tuples(st.just("lost"), RANK),
    st.tuples(st.just("admitted"), st.integers(-1, 2)),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 2.0, 12.0, 32.0])),
    st.tuples(st.just("stores open"), st.booleans()),
)


class Observer:
    """Knows from what was said who is at the barrier, and holds every begin against that."""

    def __init__(self) -> None:
        self.job = Job()
        self.at_barrier: set[int] = set()
        self.incarnations: dict[int, int] = {}
        self.looked_at = 0
        self.generation = -1

    def ready(self, rank: int, incarnation: int, committed: int) -> None:
        joined = self.job.coordinator.ranks[rank].node.joined  # else it speaks of a process that it has to end
        if joined and self.incarnations.get(rank) == incarnation and self.job.outcome is None:
            self.at_barrier.add(rank)
        self.job.tell(rank, RankReady(rank, incarnation, 1, committed, committed + 1))

    def look(self) -> None:
        """Check what was sent since the last look."""
        for _, command in self.job.sent[self.looked_at :]:
            if isinstance(command, Spawn):
                self.at_barrier.discard(command.rank)
                self.incarnations[command.rank] = command.incarnation
            elif isinstance(command, Begin) and command.generation != self.generation:
                assert self.at_barrier == set(self.job.ranks)
                assert command.generation == self.generation + 1
                self.generation += 1
                self.at_barrier = set()
        self.looked_at = len(self.job.sent)
        begun = self.at_barrier != set(self.job.ranks) or not self.job.opens
        assert self.job.outcome is not None or begun

    def apply(self, event: Any) -> None:
        """Let one thing happen."""
        job, coordinator = self.job, self.job.coordinator
        kind, rank, *more = event
        if kind == "tick":
            job.tick(rank)
        elif kind == "stores open":
            job.opens = rank
            job.open_stores()
        elif kind == "admitted":
            if job.outcome is None and (rank < 0 or (rank < 2 and coordinator.nodes[rank].lost)):
                job.admit(rank)
            else:
                with pytest.raises(ValueError):
                    job.admit(rank)
        elif kind == "joined":
            heard = [each for each in (*coordinator.nodes, *coordinator.spares) if not each.lost]
            if heard:
                job.hear(heard[rank % len(heard)], Joined())
        elif coordinator.ranks[rank].node.lost:
            return  # nothing can come from there
        elif kind == "lost":
            node = coordinator.ranks[rank].node
            self.at_barrier -= {node.index * NPROC, node.index * NPROC + 1}
            job.lose(node, "it is gone")
        elif kind == "ready":
            self.ready(rank, *more)
        elif kind == "all ready":
            for each in coordinator.ranks:
                if not each.node.lost and each.number not in self.at_barrier:
                    self.ready(each.number, each.incarnation, 1)
                    self.look()
        elif kind == "all done":
            for each in coordinator.ranks:
                if not each.node.lost:
                    job.tell(each.number, RankDone(each.number, coordinator.generation))
        elif kind == "ended":
            if self.incarnations.get(rank) == more[0]:
                self.at_barrier.discard(rank)
            job.ends(rank, more[1], forgiven=more[2], incarnation=more[0])
        elif kind == "trouble":
            job.raises(rank, more[1], generation=coordinator.generation - more[0])
        else:
            job.tell(rank, _message(kind, rank, coordinator.generation, *more))


def _message(kind: str, rank: int, generation: int, number: int = 0, more: Any = None) -> NodeMessage:
    if kind == "done":
        return RankDone(rank, generation - number)
    if kind == "progress":
        return Progress(number - more, number, number + 1, 0)
    if kind == "silent":
        return Silent(
            [[rank, number, int(more * 1000 * HEARTBEAT_S), 2, number % 2, ord("SRTD"[number % 4]), number]]
        )
    return Answered(number, rank, more, "a stack")


@settings(max_examples=400)
@given(st.booleans(), st.lists(EVENTS, max_size=60))
def test_no_order_of_messages_makes_it_raise_or_begin_without_every_rank(begun: bool, events: list[Any]) -> None:
    observer = Observer()
    for index in (0, 1):
        observer.job.join(index)
    observer.look()
    if begun:
        observer.apply(("all ready", 0))
    for event in events:
        observer.apply(event)
        observer.look()
    if observer.job.outcome is None:
        observer.job.coordinator.end(0)
    assert isinstance(observer.job.outcome, End)
