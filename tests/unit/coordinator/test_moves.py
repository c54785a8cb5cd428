"""Test how the coordinator moves the ranks of a node to a spare, and when it refuses to."""

from __future__ import annotations

import pytest

from checkpointless.launcher.coordinator.job import Node
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.messages import Discard, End, FaultNotice, Go, Joined, MoveNews, Offer, Pause
from tests.unit.messaged_job import REGROUP_S, Job, at_barrier

WHY = "an operator"


class Moving:
    """A job of two nodes and a spare, whose node 1 moves."""

    def __init__(self, spares: int = 1) -> None:
        self.job = Job().begin()
        self.spares = [self.job.join(-1) for _ in range(spares)]
        self.left = self.job.coordinator.nodes[1]
        self.news: list[MoveNews] = []

    def ask(self, node: int = 1) -> Moving:
        self.job.coordinator.moves.ask(node, WHY, self.news.append)
        return self

    def warm(self) -> Moving:
        for rank in (2, 3):
            self.job.hear(self.spares[0], at_barrier(rank, 1, -1, -1))
        self.job.tick()
        return self

    def pause(self, generation: int = 0) -> Moving:
        for rank in self.job.ranks:
            self.job.tell(rank, messages.Paused(generation, rank=rank))
        return self

    def gather(self) -> Moving:
        self.job.ready(*self.job.ranks, committed=4, entered=True)
        return self

    def offer(self, *problems: str) -> Moving:
        for rank in (2, 3):
            self.job.hear(
                self.left, messages.Offered(0, f"10.0.0.1 70{rank} secret", *problems, rank=rank, incarnation=0)
            )
        return self

    def sent_to(self, node: Node, kind: type) -> list[object]:
        return [command for to, command in self.job.sent if to is node and isinstance(command, kind)]

    @property
    def outcome(self) -> str:
        (line,) = [news.line for news in self.news if news.is_over]
        return line


def test_a_move_from_its_begin_to_its_end() -> None:
    moving = Moving().ask()
    job, (spare,) = moving.job, moving.spares
    assert {each.generation for _, each in job.take(messages.Spawn)} == {1}
    assert (job.started(), job.take(Pause)) == ([(2, 1), (3, 1)], [])
    moving.warm()
    assert job.take(Pause) == [(0, Pause(0)), (1, Pause(0))]
    moving.pause()
    assert [notice.generation for _, notice in job.take(FaultNotice)] == [0, 0]
    assert any("node 1 moves to a spare: an operator; recovering" in line for line in job.said)
    moving.gather()
    assert (moving.sent_to(moving.left, Offer), job.begun()) == ([Offer(0, 4, [2, 3])], [])
    moving.offer()
    begun = {id(node): command for node, command in job.sent if isinstance(command, Go)}
    assert {id(spare), id(job.coordinator.nodes[0])} == begun.keys()
    assert begun[id(spare)].sources == {"2": "10.0.0.1 702 secret", "3": "10.0.0.1 703 secret"}
    assert (moving.sent_to(moving.left, messages.Displaced), moving.sent_to(moving.left, Discard)) == (
        [messages.Displaced()],
        [],
    )
    job.coordinator.job.incidents.recovered(5)
    job.tick()
    assert moving.sent_to(moving.left, Discard) == [Discard(True)]
    assert moving.outcome.startswith("node 1 has moved to a spare")
    job.hear(moving.left, Joined())
    assert job.coordinator.job.free_spare() is None, "a node that was left takes nobody's place"
    job.coordinator.job.end(0)
    assert moving.sent_to(moving.left, End)


@pytest.mark.parametrize(
    ("node", "why"),
    [(2, "the job has nodes 0 to 1"), (0, "its agent coordinates the job"), (1, "no spare is free")],
)
def test_what_cannot_be_moved(node: int, why: str) -> None:
    moving = Moving(spares=0)
    moving.job.coordinator.job.host = moving.job.coordinator.nodes[0]
    moving.ask(node)
    assert f"node {node} is not moved: {why}" in moving.outcome
    assert moving.job.sent == []


def test_a_node_asks_by_itself_and_hears_why_not() -> None:
    moving = Moving(spares=0)
    moving.job.hear(moving.left, messages.MoveWanted("maintenance"))
    (refused,) = moving.sent_to(moving.left, MoveNews)
    assert isinstance(refused, MoveNews)
    assert "no spare is free" in refused.line
    assert (refused.is_over, refused.is_moved) == (True, False)
    moving = Moving()
    moving.job.hear(moving.left, messages.MoveWanted("maintenance"))
    assert len(moving.job.started()) == 2


def test_an_ordinary_fault_comes_first_and_the_move_follows_in_the_next_generation() -> None:
    moving = Moving().ask().warm()
    job = moving.job
    job.raises(0)
    moving.gather()
    assert (job.begun(), moving.sent_to(moving.left, Offer)) == ([1, 1], [])
    job.sent.clear()
    job.tick()
    assert [command.generation for _, command in job.take(Pause)] == [1, 1]
    moving.pause(0)
    assert job.take(FaultNotice) == [], "they have paused in an older generation"
    moving.pause(1)
    assert len(job.take(FaultNotice)) == 2


@pytest.mark.parametrize(("lost", "why"), [(1, "it was lost"), (0, "node 0 was lost, which needs the spare")])
@pytest.mark.parametrize("stages", range(4))
def test_a_node_that_is_lost_gets_the_spare_without_other_successors(stages: int, lost: int, why: str) -> None:
    moving = Moving().ask()
    for go_on in (moving.warm, moving.pause, moving.gather)[:stages]:
        go_on()
    (spare,), nodes = moving.spares, moving.job.coordinator.nodes
    moving.job.hear(nodes[lost], messages.Leaving("its power is off"))
    assert (moving.outcome, moving.sent_to(spare, Discard)) == (f"node 1 was not moved: {why}", [Discard(True)])
    assert nodes[lost] is not spare, "it has successors yet"
    moving.job.hear(spare, Joined())
    assert nodes[lost] is spare
    assert any(f"node {lost} was lost" in line for line in moving.job.said)


def test_a_spare_that_is_lost_early_leaves_training_undisturbed_and_later_costs_one_regrouping() -> None:
    moving = Moving().ask()
    moving.job.lose(moving.spares[0], "gone")
    undisturbed = "node 1 was not moved: the spare was lost; training goes on"
    assert moving.outcome == undisturbed
    moving = Moving().ask().warm()
    moving.job.lose(moving.spares[0], "gone")  # ranks may have agreed on a boundary
    moving.pause().gather()
    assert (moving.outcome, moving.job.begun(), moving.sent_to(moving.left, Offer)) == (undisturbed, [1, 1], [])
    moving = Moving().ask().warm().pause().gather()
    moving.job.lose(moving.spares[0], "gone")
    assert moving.job.begun() == [1, 1]


def test_a_state_that_cannot_be_offered_stays() -> None:
    moving = Moving().ask().warm().pause().gather().offer("no memory")
    assert "node 1 was not moved: its state cannot be offered: no memory" in moving.outcome
    assert moving.job.begun() == [1, 1]
    assert moving.job.coordinator.nodes[1] is moving.left


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            messages.RankEnded(7, False, "rank-2.log", [], rank=2, incarnation=1),
            "rank 2 exited with code 7 on the spare; its log: rank-2.log",
        ),
        (messages.DeviceBad(2, 1, "it is hot"), "a device of the spare must not be used: it is hot"),
        (None, "its successors did not come within 30 s"),
    ],
)
def test_successors_that_do_not_come(message: messages.NodeMessage | None, why: str) -> None:
    moving = Moving().ask()
    if message is None:
        moving.job.tick(REGROUP_S + 1)
    else:
        moving.job.hear(moving.spares[0], message)
    assert why in moving.outcome
