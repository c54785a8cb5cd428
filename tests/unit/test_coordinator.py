"""The coordinator, driven by messages alone: no processes, no sockets, no store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointless.agent.coordinator import Coordinator, Limits
from checkpointless.agent.hangs import Heartbeat
from checkpointless.agent.incidents import STILLBORN_LIMIT, CauseKind
from checkpointless.agent.node_protocol import (
    STATES,
    Alive,
    AllDone,
    Answered,
    Ask,
    Begin,
    Command,
    Discard,
    End,
    Interrupt,
    JobOver,
    Joined,
    Kill,
    Leaving,
    NodeMessage,
    OpenStore,
    Progress,
    RankDone,
    RankEnded,
    RankReady,
    Silent,
    Spawn,
    Standing,
    StoreOpened,
    Trouble,
)
from checkpointless.agent.roster import Node, Standings
from checkpointless.agent.workers import WorkerState
from checkpointless.telemetry.events import EventLog, read_events

NPROC = 2
HEARTBEAT_S, REGROUP_S = 10.0, 30.0
AnyCommand = TypeVar("AnyCommand")


class Job:
    """A coordinator and what it says to whom.

    Args:
        nnodes: how many nodes the job has; :meth:`begin` admits them.
        max_incidents: how many it may recover from.

    Attributes:
        stores: which it had opened, and by which node.
        opens: whether the nodes open them at once.
    """

    def __init__(self, nnodes: int = 2, max_incidents: int | None = None) -> None:
        self.said: list[str] = []
        self.sent: list[tuple[Node | None, Command]] = []
        self.stores: list[tuple[int, int]] = []
        self.opens = True
        self._to_open: list[tuple[Node, OpenStore]] = []
        self.coordinator = Coordinator(
            Limits(Heartbeat.of(HEARTBEAT_S), REGROUP_S, max_incidents),
            nnodes=nnodes,
            nproc=NPROC,
            events=EventLog(None),
            say=self.said.append,
        )
        self.ranks = range(nnodes * NPROC)

    def admit(self, index: int, nproc: int = NPROC) -> Node:
        place: list[Node] = []

        def send(command: Command) -> None:
            if isinstance(command, OpenStore):
                self.stores.append((command.generation, place[0].index))
                self._to_open.append((place[0], command))
            else:
                self.sent.append((place[0] if place else None, command))

        place.append(self.coordinator.admit(index, nproc, send))
        return place[0]

    def hear(self, node: Node, message: NodeMessage) -> None:
        """A node says something."""
        self.coordinator.hear(node, message)
        self.open_stores()

    def lose(self, node: Node, reason: str) -> None:
        """A node is lost."""
        self.coordinator.lose(node, reason)
        self.open_stores()

    def open_stores(self) -> None:
        while self.opens and self._to_open:
            node, command = self._to_open.pop(0)
            if not node.lost:
                generation = command.generation
                self.coordinator.hear(node, StoreOpened(generation, f"10.0.0.{node.index}", 5000 + generation))

    def join(self, index: int) -> Node:
        node = self.admit(index)
        self.hear(node, Joined())
        return node

    def tell(self, rank: int, message: NodeMessage) -> None:
        """The node of ``rank`` says something."""
        self.hear(self.coordinator.ranks[rank].node, message)

    def ready(self, *ranks: int, committed: int = -1, making: int = -1) -> None:
        for rank in ranks:
            incarnation = self.coordinator.ranks[rank].incarnation
            self.tell(rank, RankReady(rank, incarnation, 1000 + rank, committed, making))

    def raises(self, rank: int, kind: CauseKind = CauseKind.EXCEPTION, **more: Any) -> None:
        self.tell(rank, trouble(rank, kind, **{"generation": self.coordinator.generation, **more}))

    def ends(self, rank: int, code: int = -9, *, forgiven: bool = False, incarnation: int | None = None) -> None:
        now = self.coordinator.ranks[rank].incarnation if incarnation is None else incarnation
        self.tell(rank, RankEnded(rank, now, code, forgiven, 3, 4, f"rank-{rank}.log", ["its last line"]))

    def begin(self) -> Job:
        """All join and get to the barrier; what was sent until then is forgotten."""
        for node in self.coordinator.nodes:
            self.join(node.index)
        self.ready(*self.ranks)
        self.sent.clear()
        return self

    def take(self, kind: type[AnyCommand]) -> list[tuple[int, AnyCommand]]:
        """The commands of one kind since the last call for any, and the node that each went to."""
        return [
            (-1 if node is None else node.index, command)
            for node, command in self.sent
            if isinstance(command, kind)
        ]

    def tick(self, after_s: float = 0.0) -> None:
        self.coordinator.tick(time.monotonic() + after_s)
        self.open_stores()

    @property
    def outcome(self) -> End | None:
        return self.coordinator.outcome

    @property
    def last_word(self) -> str:
        assert self.outcome is not None
        assert self.outcome.code == 1
        return self.outcome.last_words[-1]


def go_env(generation: int, host: int = 0) -> dict[str, str]:
    count = str(generation)
    return {
        "MASTER_ADDR": f"10.0.0.{host}",
        "MASTER_PORT": str(5000 + generation),
        "TORCHELASTIC_RESTART_COUNT": count,
        "JOB_RESTART_COUNT": count,
    }


def trouble(rank: int, kind: CauseKind, *, generation: int = 0, what: str = "raised ValueError") -> Trouble:
    return Trouble(generation, rank, int(kind), "exception", what, 4, "no", "ValueError", "no", "Traceback\n", 3, 4)


# ---- the start


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


def test_ranks_that_never_enter_end_the_job_after_a_while() -> None:
    job = Job()
    for index in (0, 1):
        job.join(index)
    job.ready(0, 2)
    job.tick(HEARTBEAT_S - 1)
    assert job.outcome is None
    job.tick(HEARTBEAT_S + 1)
    assert job.last_word == "rank 1, 3 did not enter the block within 10 s after the first rank did"


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
    job = Job()
    job.coordinator._events = EventLog(tmp_path / "events.jsonl", node=0)
    return job.begin()


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
    assert {rank.state for rank in job.coordinator.ranks} == {WorkerState.RUNNING}
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
def test_standings_agree_with_brute_force(said: Sequence[tuple[int, tuple[int, int] | None]]) -> None:
    standings, last = Standings(), dict[int, tuple[int, int]]()
    for node, steps in said:
        if steps is None:
            standings.drop(node)
            last.pop(node, None)
        else:
            standings.put(node, Progress(*steps, 10, 0))
            last[node] = steps
        assert len(standings) == len(last)
        if last:
            assert standings.oldest == min(oldest for oldest, _ in last.values())
            assert standings.newest == max(newest for _, newest in last.values())


# ---- hangs


def silence(job: Job, *ranks: int, beat: int = 7, age_s: float = HEARTBEAT_S + 0.1) -> None:
    for node in job.coordinator.nodes:
        mine = [rank for rank in ranks if rank // NPROC == node.index]
        job.hear(node, Silent([[rank, beat, int(1000 * age_s), 4, 0] for rank in mine]))


def test_silent_ranks_are_asked_and_who_waits_in_no_collective_is_replaced() -> None:
    job = Job(nnodes=3).begin()
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
    assert job.take(Kill) == [(2, Kill(4, 0, 0))]
    job.ends(4, forgiven=True)
    job.ready(*job.ranks)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1, 1]
    job.tick()
    assert len(job.take(Ask)) == 2


def test_who_does_not_answer_in_time_hangs() -> None:
    job = Job().begin()
    silence(job, 3)
    job.tick()
    job.tick(2.0)
    assert job.take(Kill) == [(1, Kill(3, 0, 0))]


def test_ranks_that_all_wait_for_each_other_leave_together_and_nobody_is_killed() -> None:
    job = Job().begin()
    silence(job, *job.ranks)
    job.tick()
    for rank in job.ranks:
        job.tell(rank, Answered(1, rank, True, "in a collective"))
    job.tick()
    cause = "ranks waited for each other with no progress for 10 s at step 4"
    assert job.take(Interrupt) == [(node, Interrupt(0, "1", cause, -1)) for node in (0, 1)]
    assert job.take(Kill) == []


@pytest.mark.parametrize("again", [(), (3,)])
def test_a_rank_that_moved_on_since_it_was_asked_is_left_alone(again: tuple[int, ...]) -> None:
    job = Job().begin()
    silence(job, 3)
    job.tick()
    silence(job, *again, beat=8, age_s=HEARTBEAT_S * 0.95)
    job.tell(3, Answered(1, 3, False, "elsewhere"))
    job.tick()
    assert (job.take(Interrupt), job.take(Kill)) == ([], [])


# ---- nodes


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    job = Job().begin()
    spare = job.join(-1)
    assert job.sent == []
    lost = job.coordinator.nodes[1]
    job.lose(lost, "it closed the connection")
    cause = "node 1 was lost: it closed the connection"
    assert job.take(Interrupt) == [(0, Interrupt(0, "1", cause, -1))]
    assert [(node, spawn.rank, spawn.incarnation) for node, spawn in job.take(Spawn)] == [(1, 2, 1), (1, 3, 1)]
    assert job.coordinator.nodes[1] is spare
    assert job.coordinator.spares == []
    with pytest.raises(ValueError, match="which it does not run"):
        job.hear(lost, RankReady(2, 1, 1, -1, -1))
    job.ready(*job.ranks)
    assert [node for node, _ in job.take(Begin)] == [0, 1]
    assert job.said[1] == "a spare takes the place of node 1"


@pytest.mark.parametrize("index", [1, -1])
def test_without_a_spare_another_node_may_come_in_time(index: int) -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "it is gone")
    assert job.said[-1] == "no spare is ready: waiting up to 30 s for another node 1"
    job.ready(0, 1)
    assert job.take(Begin) == []
    assert job.take(Spawn) == []
    job.join(index)
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert [node for node, _ in job.take(Begin)] == [0, 1]


def test_without_another_node_the_job_ends() -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.ready(0, 1)
    job.tick(REGROUP_S + 1)
    assert job.last_word == "node 1 was lost (it is gone) and no other took its place within 30 s"
    assert [node for node, _ in job.take(End)] == [0]


def test_processes_for_two_lost_nodes_are_asked_for_when_both_places_are_taken() -> None:
    job = Job(nnodes=3).begin()
    for index in (0, 2):
        job.lose(job.coordinator.nodes[index], "it is gone")
    job.ready(2, 3)
    job.join(2)
    assert job.take(Spawn) == []
    job.join(0)
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [0, 1, 4, 5]
    job.ready(0, 1, 4, 5)
    assert [node for node, _ in job.take(Begin)] == [0, 1, 2]


def test_a_node_that_is_lost_before_the_job_began_may_come_back() -> None:
    job = Job()
    job.lose(job.join(1), "it is gone")
    assert job.said[0] == "node 1 was lost before the job began (it is gone)"
    assert "waiting up to 600 s for another node 1" in job.said[1]
    job.join(0)
    assert job.sent == []
    job.join(1)
    assert [spawn.incarnation for _, spawn in job.take(Spawn)] == [0] * 4


def test_a_spare_that_is_lost_is_not_missed() -> None:
    job = Job().begin()
    job.lose(job.join(-1), "it is gone")
    assert (job.sent, job.said) == ([], [])
    job.lose(job.coordinator.nodes[1], "it is gone")
    assert "no spare is ready" in job.said[-1]


def test_a_node_whose_processes_have_ended_well_is_not_missed() -> None:
    job = Job().begin()
    for rank in job.ranks:
        job.tell(rank, RankDone(rank, 0))
    job.ends(2, 0)
    job.ends(3, 0)
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.ends(0, 0)
    assert job.outcome is None
    job.ends(1, 0)
    assert job.outcome == End(0, [])


def test_a_node_lost_before_its_processes_have_ended_is_no_success() -> None:
    job = Job().begin()
    for rank in job.ranks:
        job.tell(rank, RankDone(rank, 0))
    job.ends(2, 0)
    job.lose(job.coordinator.nodes[1], "it is gone")
    assert job.last_word == "node 1 was lost before its ranks had ended (it is gone)"


def test_a_replacement_that_still_imports_is_waited_for() -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.ready(0)
    node = job.admit(1)
    job.ready(1)
    assert job.outcome is None
    job.tick(REGROUP_S + 0.1)
    assert job.outcome is None
    assert job.take(Kill) == []
    job.hear(node, Joined())
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [2, 3]
    job.ready(2, 3)
    assert [index for index, _ in job.take(Begin)] == [0, 1]


def test_a_replacement_that_is_lost_before_its_ranks_were_started_is_replaced_by_a_spare() -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "it is gone")
    replacement = job.admit(1)
    job.join(-1)
    job.lose(replacement, "gone as well")
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [2, 3]


def test_a_node_lost_late_in_an_incident_has_its_own_time() -> None:
    job = Job(nnodes=3).begin()
    job.raises(0)
    job.tick(REGROUP_S - 0.1)
    job.lose(job.coordinator.nodes[1], "it is gone")
    job.tick(REGROUP_S - 0.1)
    assert job.outcome is None


def test_a_spare_that_is_told_to_stop_is_not_the_end_of_the_job() -> None:
    job = Job().begin()
    spare = job.join(-1)
    job.hear(spare, Leaving("stopped by SIGTERM"))
    assert job.outcome is None
    assert job.coordinator.spares == []


def test_a_node_that_leaves_is_lost_once_and_not_again_when_its_connection_closes() -> None:
    job = Job().begin()
    job.hear(job.coordinator.nodes[1], Leaving("stopped by SIGTERM"))
    said = list(job.said)
    job.tick(REGROUP_S - 0.1)
    job.lose(job.coordinator.nodes[1], "it closed the connection")
    assert job.said == said
    job.tick(REGROUP_S + 0.1)
    assert "node 1 was lost (stopped by SIGTERM)" in job.last_word


def test_a_node_that_is_told_to_stop_is_replaced_but_not_the_coordinators() -> None:
    job = Job().begin()
    job.coordinator.host = job.coordinator.nodes[0]
    job.join(-1)
    job.hear(job.coordinator.nodes[1], Leaving("stopped by SIGTERM"))
    assert [spawn.rank for _, spawn in job.take(Spawn)] == [2, 3]
    job.hear(job.coordinator.nodes[0], Leaving("stopped by SIGTERM"))
    assert job.last_word == "stopped by SIGTERM"


def test_nodes_that_never_join_end_the_job_by_name() -> None:
    job = Job(nnodes=3)
    job.join(1)
    job.tick(600.1)
    assert job.last_word == "node 0, 2 did not join the job within 600 s"


def test_a_rank_that_was_killed_for_being_late_and_was_not_is_a_fault() -> None:
    job = Job().begin()
    job.ends(3, forgiven=True)
    assert [index for index, _ in job.take(Interrupt)] == [0, 1]


# ---- stores


def test_nobody_is_started_and_nothing_begins_before_the_store_is_there() -> None:
    job = Job()
    job.opens = False
    job.join(1)
    job.join(0)
    assert (job.stores, job.sent) == ([(0, 0)], [])
    job.hear(job.coordinator.nodes[1], StoreOpened(0, "10.0.0.9", 1))
    assert job.sent == []
    job.opens = True
    job.open_stores()
    assert {spawn.env["MASTER_ADDR"] for _, spawn in job.take(Spawn)} == {"10.0.0.0"}
    job.ready(*job.ranks)
    job.raises(0)
    job.opens = False
    job.raises(1)
    job.ready(*job.ranks)
    job.sent.clear()
    job.raises(2, generation=1)
    job.ready(*job.ranks)
    assert job.take(Begin) == []
    job.opens = True
    job.open_stores()
    assert [begin.env for _, begin in job.take(Begin)] == [go_env(2), go_env(2)]


def test_the_store_moves_to_another_node_when_its_own_is_lost() -> None:
    job = Job().begin()
    job.join(-1)
    job.lose(job.coordinator.nodes[0], "it is gone")
    assert job.stores[1:] == [(1, 1)]
    job.ready(*job.ranks)
    assert [begin.env for _, begin in job.take(Begin)] == [go_env(1, host=1)] * 2
    job.opens = False
    job.raises(3)
    job.lose(job.coordinator.nodes[0], "it is gone, too")
    assert job.stores[2:] == [(2, 0), (2, 1)]
    job.join(0)
    job.opens = True
    job.open_stores()
    job.ready(*job.ranks)
    assert [begin.env for _, begin in job.take(Begin)][2:] == [go_env(2, host=1)] * 2


def test_a_node_that_opens_no_store_ends_the_job_in_time() -> None:
    job = Job().begin()
    job.opens = False
    job.raises(0)
    job.ready(*job.ranks)
    job.tick(REGROUP_S + 1)
    assert job.last_word == "node 0 opened no store for generation 1 in time"


# ---- a coordinator that finds its ranks running

RUNNING, DONE = WorkerState.RUNNING, WorkerState.DONE


def standing(
    job: Job,
    index: int,
    *states: WorkerState,
    generation: int = 3,
    finished: bool = False,
    incarnation: int = 1,
    before: NodeMessage | None = None,
) -> Node:
    """A node says what its ranks were doing while there was no coordinator."""
    node = job.admit(index)
    if before is not None:
        job.hear(node, before)
    ranks = [
        [index * NPROC + local, incarnation, STATES.index(state), 7 + local, 8 + local]
        for local, state in enumerate(states)
    ]
    job.hear(node, Standing(generation, 2, 6, "the run", finished, ranks))
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
    assert [interrupt.generation for _, interrupt in job.take(Interrupt)] == [3, 3]
    ((_, spawn),) = job.take(Spawn)
    assert (spawn.rank, spawn.incarnation, spawn.generation) == (1, 2, 4)
    assert spawn.env["TORCHELASTIC_RUN_ID"] == "the run"
    job.ready(*job.ranks, committed=8, making=9)
    assert [(begin.generation, begin.high_water) for _, begin in job.take(Begin)] == [(4, 8), (4, 8)]


def test_a_rank_that_died_in_between_is_replaced() -> None:
    job = Job()
    standing(job, 1, RUNNING, RUNNING)
    standing(job, 0, RUNNING, WorkerState.GONE, before=RankEnded(1, 1, -11, False, 7, 8, "rank-1.log", []))
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
    standing(job, 1, WorkerState.FINISHED, WorkerState.GONE, finished=True)
    assert [node for node, _ in job.take(AllDone)] == [0, 1]
    for rank in (0, 1, 2):
        job.ends(rank, 0)
    assert job.outcome == End(0, [])


def test_a_finished_rank_that_failed_in_between_is_no_success() -> None:
    job = Job()
    standing(job, 1, WorkerState.GONE, WorkerState.GONE, finished=True)
    job.hear(job.coordinator.nodes[1], RankEnded(3, 1, 3, False, 7, 8, "rank-3.log", []))
    standing(job, 0, DONE, DONE)
    assert job.last_word == "rank 3 exited with code 3"


def test_a_node_that_comes_back_after_it_was_lost_has_to_end_its_ranks_first() -> None:
    job = Job().begin()
    job.lose(job.coordinator.nodes[1], "no word from it for 10 s")
    node = standing(job, 1, RUNNING, RUNNING, generation=0, incarnation=0)
    assert job.take(Discard) == [(1, Discard())]
    job.ready(2, 3)  # under way when it was told
    job.ready(0, 1)
    assert (job.take(Begin), job.take(Spawn)) == ([], [])
    job.hear(node, Joined())
    assert [(spawn.rank, spawn.incarnation) for _, spawn in job.take(Spawn)] == [(2, 1), (3, 1)]
    job.ready(2, 3)
    assert [begin.generation for _, begin in job.take(Begin)] == [1, 1]


def test_a_job_that_had_not_begun_begins() -> None:
    job = Job()
    standing(job, 0, WorkerState.READY, WorkerState.STARTING, generation=-1, incarnation=0)
    standing(job, 1, WorkerState.READY, WorkerState.READY, generation=-1, incarnation=0)
    assert (job.take(Spawn), job.take(Interrupt)) == ([], [])
    job.ready(1)
    assert [begin.generation for _, begin in job.take(Begin)] == [0, 0]


STATE = st.sampled_from([state for state in STATES if state is not WorkerState.FINISHED])


@settings(max_examples=150, deadline=None)
@given(st.lists(STATE, min_size=4, max_size=4), st.tuples(st.integers(0, 3), st.integers(0, 3)), st.booleans())
def test_whatever_the_ranks_did_they_are_left_alone_or_regrouped(
    states: list[WorkerState], generations: tuple[int, int], held: bool
) -> None:
    job = Job()
    job.opens = not held
    for index in (0, 1):
        standing(job, index, *states[NPROC * index :][:NPROC], generation=generations[index])
    assert job.outcome is None
    if set(states) <= {RUNNING, DONE} and generations[0] == generations[1]:
        assert (job.take(Interrupt), job.stores) == ([], [])
        assert bool(job.take(AllDone)) == (set(states) == {DONE})
        return
    assert {interrupt.generation for _, interrupt in job.take(Interrupt)} == {max(generations)}
    waiting = [rank for rank in job.ranks if states[rank] not in (WorkerState.READY, WorkerState.GONE)]
    job.ready(*waiting)
    job.opens = True
    job.open_stores()
    spawned = [spawn.rank for _, spawn in job.take(Spawn)]
    assert spawned == [rank for rank in job.ranks if states[rank] is WorkerState.GONE]
    job.ready(*spawned)
    assert {begin.generation for _, begin in job.take(Begin)} == {max(generations) + 1}


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
        return Silent([[rank, number, int(more * 1000 * HEARTBEAT_S), 2, number % 2]])
    return Answered(number, rank, more, "a stack")


@settings(max_examples=400, deadline=None)
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
