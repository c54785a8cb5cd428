"""Test what the coordinator makes of what ranks do, and of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.job import Node, _ProgressReports
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.causes import CauseKind
from checkpointless.launcher.protocol.messages import Answer, Done, End, GiveUp, Go, Joined, Kill, Progress, Spawn
from checkpointless.observability.telemetry.events import read_events
from tests.drawn import examples
from tests.unit.messaged_job import HEARTBEAT_S, NPROC, Job, at_barrier


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
    assert (spawned[3][1].env["RANK"], spawned[3][1].env["GROUP_RANK"]) == ("3", "1")


def test_a_node_that_does_not_fit_is_refused() -> None:
    job = Job()
    with pytest.raises(ValueError, match="it runs 3 ranks, and the nodes of this job run 2"):
        job.admit(0, nproc=3)
    with pytest.raises(ValueError, match="there is no node 2 in a job of 2"):
        job.admit(2)
    job.coordinator.job.end(0)
    with pytest.raises(ValueError, match="the job is over"):
        job.admit(0)


def test_a_node_may_not_speak_of_ranks_that_it_does_not_run(job: Job) -> None:
    with pytest.raises(ValueError, match="node 0 named rank 2, which it does not run"):
        job.hear(job.coordinator.nodes[0], Done(0, rank=2))


def test_ranks_that_never_enter_are_replaced_once_and_then_end_the_job() -> None:
    job = Job().join_all()
    job.ready(0, 2)
    job.tick(HEARTBEAT_S - 1)
    assert job.outcome is None
    job.tick(HEARTBEAT_S + 1)
    assert "rank 1 did not enter the block within 10 s after the first rank did" in job.said[0]
    assert job.take(Kill) == [(0, Kill(1, 0, -1)), (1, Kill(3, 0, -1))]
    job.ends(1, forgiven=True)
    job.ends(3, forgiven=True)
    assert job.started()[-2:] == [(1, 1), (3, 1)]
    job.ready(1)
    job.tick(2 * HEARTBEAT_S + 2)
    assert job.last_word == "rank 3 did not enter the block within 10 s, also not as a new process"


# ---- the end


@pytest.mark.parametrize("ready_first", [True, False])
def test_a_rank_that_ends_while_another_waits_for_it(ready_first: bool) -> None:
    job = Job().join_all()
    if ready_first:
        job.ready(2)
    job.ends(1, 0)
    if not ready_first:
        job.ready(2)
    assert job.last_word == "rank 1 ended without entering the block that rank 2 waits in"


def test_a_node_that_gives_up_ends_the_job_everywhere(job: Job) -> None:
    spare = job.join(-1)
    job.hear(job.coordinator.nodes[1], GiveUp(-1, "stopped by SIGTERM"))
    assert (job.last_word, [node for node, _ in job.take(End)]) == ("stopped by SIGTERM", [0, 1, spare.index])
    job.sent.clear()
    job.raises(0)
    job.ends(0)
    job.tick(1000)
    job.coordinator.job.end(0)
    assert job.sent == []


@pytest.mark.parametrize("code", [0, 256, -256, 1 << 60])
def test_a_job_that_was_given_up_does_not_end_well(job: Job, code: int) -> None:
    job.hear(job.coordinator.nodes[0], GiveUp(-1, "it left", code))
    assert job.outcome == End(1, ["it left"])


# ---- progress


def test_recovered_is_said_when_every_node_has_made_the_lost_step(job: Job) -> None:
    job.raises(0)
    job.ready(*job.ranks, committed=3, making=4)
    job.tell(0, Progress(4, 4, 5, 0))
    job.tell(2, Progress(3, 4, 5, 0))
    assert len(job.said) == 1
    job.tell(2, Progress(4, 4, 5, 0))
    assert job.said[1].startswith("incident 1: recovered in ")


def test_a_fall_back_to_storage_is_seen_when_every_node_is_behind(job: Job) -> None:
    for rank, step in ((0, 9), (2, 9), (0, 5), (2, 6)):
        job.tell(rank, Progress(step, step, step + 1, 0))
    job.raises(0)
    job.ready(*job.ranks, committed=3)
    assert [begin.high_water for _, begin in job.take(Go)] == [3, 3]


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
        self.job.tell(rank, at_barrier(rank, incarnation, committed, committed + 1))

    def is_away(self, node: Node) -> bool:
        return bool(node.lost) or node.index in self.job.coordinator.job.back_by_s

    def look(self) -> None:
        """Check what was sent since the last look."""
        for _, command in self.job.sent[self.looked_at :]:
            if isinstance(command, Spawn):
                self.at_barrier.discard(command.rank)
                self.incarnations[command.rank] = command.incarnation
            elif isinstance(command, Go) and command.generation != self.generation:
                assert (self.at_barrier, command.generation) == (set(self.job.ranks), self.generation + 1)
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
            if job.outcome is None and (rank < 0 or (rank < 2 and self.is_away(coordinator.nodes[rank]))):
                job.admit(rank)
            else:
                with pytest.raises(ValueError):
                    job.admit(rank)
        elif kind == "joined":
            heard = [each for each in (*coordinator.nodes, *coordinator.spares) if not self.is_away(each)]
            if heard:
                job.hear(heard[rank % len(heard)], Joined())
        elif self.is_away(coordinator.ranks[rank].node) or coordinator.ranks[rank].node.is_back:
            return  # nothing can come from there
        elif kind == "lost":
            node = coordinator.ranks[rank].node
            self.at_barrier -= {node.index * NPROC, node.index * NPROC + 1}
            job.lose(node, "it is gone")
        elif kind == "ready":
            self.ready(rank, *more)
        elif kind in ("all ready", "all done"):
            for each in coordinator.ranks:
                if self.is_away(each.node) or each.node.is_back:
                    continue
                if kind == "all done":
                    job.tell(each.number, Done(coordinator.job.generation, rank=each.number))
                elif each.number not in self.at_barrier:
                    self.ready(each.number, each.incarnation, 1)
                    self.look()
        elif kind == "ended":
            if self.incarnations.get(rank) == more[0]:
                self.at_barrier.discard(rank)
            job.ends(rank, more[1], forgiven=more[2], incarnation=more[0])
        elif kind == "trouble":
            job.raises(rank, more[1], generation=coordinator.job.generation - more[0])
        else:
            job.tell(rank, _message(kind, rank, coordinator.job.generation, *more))


def _message(kind: str, rank: int, generation: int, number: int = 0, more: Any = None) -> messages.NodeMessage:
    if kind == "done":
        return Done(generation - number, rank=rank)
    if kind == "progress":
        return Progress(number - more, number, number + 1, 0)
    if kind == "silent":
        age_ms = int(more * 1000 * HEARTBEAT_S)
        return messages.Silent(
            [messages.SilentRank(rank, number, age_ms, age_ms, 2, bool(number % 2), ord("SRTD"[number]), number)]
        )
    return Answer(number, more, "a stack", rank=rank)


@examples(400)
@given(st.booleans(), st.lists(EVENTS, max_size=60))
@example(True, [("all done", 0), ("lost", 0), ("admitted", 0), ("all ready", 2)])
@example(  # rank 0 is ready before its node was told to start the process, which waits for a store
    False,
    [("all ready", 0), ("stores open", False), ("ended", 0, 0, 0, False), ("all ready", 0), ("stores open", True)],
)
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
        observer.job.coordinator.job.end(0)
    assert isinstance(observer.job.outcome, End)


def test_a_coordinator_notes_progress_now_and_then(job: Job, tmp_path: Path) -> None:
    job.progress(1)
    job.coordinator._note_progress_at_s = 0.0
    job.progress(2)
    job.progress(3)
    notes = [event.fields["high_water"] for event in read_events(tmp_path) if event.stage == "progress"]
    assert notes == [2]


@given(st.lists(st.tuples(st.integers(0, 4), st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9)))))
def test_reports_agree_with_brute_force(said: Sequence[tuple[int, tuple[int, int] | None]]) -> None:
    reports, last = _ProgressReports(5), dict[int, tuple[int, int]]()
    for node, steps in said:
        if steps is None:
            reports.drop(node)
            last.pop(node, None)
        else:
            reports.put(node, Progress(*steps, 10, 0))
            last[node] = steps
        assert reports.are_complete == (len(last) == 5)
        if last:
            assert reports.oldest == min(oldest for oldest, _ in last.values())
            assert reports.newest == max(newest for _, newest in last.values())
