"""Test a node's agent by commands alone: what it does when they cross with what happens to its processes."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from checkpointless.launcher.agent.node import _BeatWatch
from checkpointless.launcher.agent.ranks.process_keeper import LEAVE_S, LocalRank, _Beats
from checkpointless.launcher.coordinator.job_config import Heartbeat
from checkpointless.launcher.protocol import messages
from checkpointless.launcher.protocol.board import BoardReading
from checkpointless.launcher.protocol.messages import End, Go, Kill, Progress, RankEnded, RankState, Silent, Spawn
from checkpointless.system.environment import SOURCE_ENV
from tests.unit.agent.commanded_node import SEVERAL, CommandedNode

Told = TypeVar("Told", Progress, Silent)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CommandedNode]:
    """Provide an agent of two ranks, 0 and 1, whose processes have been started."""
    with closing(CommandedNode(tmp_path, heartbeat_timeout_s=10.0)) as made:
        start_two(made)
        yield made


def start_two(node: CommandedNode) -> None:
    node.tick()
    assert node.said == [messages.Joined()]
    for rank in (0, 1):
        node.agent.obey(Spawn(rank, 0, 0, "", {}))
    node.tick()


def test_a_process_that_ended_before_all_were_done_does_not_keep_the_agent(node: CommandedNode) -> None:
    node.ends(0)
    assert isinstance(node.said[-1], RankEnded)
    node.agent.obey(messages.Finish())  # it was under way when the process ended
    node.ends(1, 0)
    assert node.agent.alive() == []
    node.agent.obey(End(1, ["rank 0 killed by SIGKILL"]))
    assert node.agent.job.outcome == End(1, ["rank 0 killed by SIGKILL"])


def test_ranks_that_wait_for_the_next_block_are_not_ended_with_this_one(node: CommandedNode) -> None:
    for number, state in enumerate((RankState.DONE, RankState.READY)):
        node.agent.ranks[number].state = state
    for _ in range(2):
        node.agent.obey(messages.Finish())
    assert [rank.state for rank in node.agent.ranks.values()] == [RankState.FINISHED, RankState.READY]


def test_a_kill_that_comes_after_the_next_generation_began_is_ignored(node: CommandedNode) -> None:
    node.agent.obey(Go(0, None, {}, -1, -1))
    node.agent.obey(Go(1, "1", {}, -1, -1))
    node.agent.obey(Kill(1, 0, 0))
    assert node.starter.signals == []
    node.agent.obey(Kill(1, 0, 1))
    assert node.starter.signals == [(1001, signal.SIGKILL)]


def test_a_later_sigint_kills_but_not_one_that_is_of_the_same_ctrl_c(node: CommandedNode) -> None:
    """A terminal sends it to its whole group, and ``timeout``, which runs the agent, passes it on, too."""
    began_s = time.monotonic()
    node.agent.clock = lambda: began_s
    for _ in range(3):
        node.agent.interrupted(signal.SIGINT)
    node.tick(0.1)
    assert node.starter.signals == [(1000, signal.SIGINT), (1001, signal.SIGINT)]
    node.agent.clock = lambda: began_s + 1.5
    node.agent.interrupted(signal.SIGINT)
    node.tick(1.6)
    assert node.starter.signals[2:] == [(1000, signal.SIGKILL), (1001, signal.SIGKILL)]
    assert node.printed == ["ranks 0-1 did not end before a second SIGINT came and were killed"]


@pytest.mark.parametrize("grace_s", [0.0, 2.0])
def test_the_end_does_not_wait_for_what_the_kernel_does_not_end(node: CommandedNode, grace_s: float) -> None:
    node.agent.end(End(1, ["the coordinator was lost"]), grace_s=grace_s)
    node.starter.signals.clear()
    for _ in range(3):
        node.tick(grace_s + 0.1)
    assert node.starter.signals == [(1000, signal.SIGKILL), (1001, signal.SIGKILL)]  # and not in each turn
    node.ends(0)
    node.tick(grace_s + LEAVE_S + 0.1)
    assert node.agent.alive() == []
    assert node.printed[-1].startswith("rank 1 did not exit within 5 s after SIGKILL")


def test_a_process_that_was_to_be_killed_before_it_was_there_is_killed_then(node: CommandedNode) -> None:
    node.ends(1)
    node.starter.coming.clear()
    node.agent.obey(Spawn(1, 1, 1, "1", {}))
    node.agent.obey(Kill(1, 1, node.agent.job.generation))
    assert node.starter.signals == []
    node.tick()
    assert node.starter.signals == [(1001, signal.SIGKILL)]


# ---- beats


class Training(CommandedNode):
    """Represents an agent of two ranks that train, by a clock of the test's own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        start_two(self)
        for rank in self.agent.ranks.values():
            rank.state = RankState.READY
        self.agent.obey(Go(0, None, {}, -1, -1))
        self.now_s = time.monotonic()

    def step(self, number: int, seconds: float, then_s: float = 0.0) -> None:
        """Have both ranks make a step of ``seconds``, and do something else for ``then_s`` before the next."""
        boards = [rank.board for rank in self.agent.ranks.values()]
        for board in boards:
            board.begin_step(number)
        self.later(0.01)
        self.later(seconds)
        for board in boards:
            board.set_committed(number)
            board.beat()
        self.later(0.01)
        self.later(then_s)

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.agent.tick(self.now_s)

    def told(self, kind: type[Told]) -> list[Told]:
        found = [message for message in self.said if isinstance(message, kind)]
        self.said.clear()
        return found


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with closing(Training(tmp_path)) as made:
        yield made


def test_the_longest_step_is_told_and_neither_the_first_ones_nor_what_is_between_two(training: Training) -> None:
    for number in range(2):
        training.step(number, 50.0)
    assert {message.longest_ms for message in training.told(Progress)} == {0}
    for number, seconds in ((2, 1.0), (3, 4.0), (4, 2.0)):
        training.step(number, seconds, then_s=40.0)
    longest = [message.longest_ms for message in training.told(Progress)]
    assert 3900 <= longest[-1] <= 4100
    training.step(5, 1.0)
    training.agent.obey(Go(1, "1", {}, 5, 6))
    training.later(1.0)
    assert training.told(Progress)[-1].longest_ms == 0


def test_silence_is_told_by_the_limit_of_where_the_rank_is(training: Training) -> None:
    for number in range(5):
        training.step(number, 2.0)
    training.step(5, 2.0, then_s=290.0)  # writes a checkpoint
    assert training.told(Silent) == []
    for rank in training.agent.ranks.values():
        rank.board.begin_step(6)
    training.later(0.1)
    training.later(14.0)
    assert training.told(Silent) == []
    training.later(2.0)
    (silent,) = training.told(Silent)
    assert [(rank.number, rank.making, rank.in_step) for rank in silent.ranks] == [(0, 6, True), (1, 6, True)]


def test_the_longest_pause_is_told_and_outlasts_the_generation(training: Training) -> None:
    for number in range(4):
        training.step(number, 1.0, then_s=200.0 if number == 3 else 0.0)
    training.step(4, 1.0)
    assert training.told(Progress)[-1].pause_ms // 1000 == 200
    training.agent.obey(Go(1, "1", {}, 4, 5))
    training.later(1.0)
    assert training.told(Progress)[-1].pause_ms // 1000 == 200


def test_a_job_shows_progress_with_the_second_beat_of_a_block(training: Training) -> None:
    board = training.agent.ranks[0].board
    board.beat()  # at the entry
    training.later(0.3)
    assert not training.told(Progress)[-1].shows
    board.beat()
    training.later(0.3)
    training.later(0.3)
    assert training.told(Progress)[-1].shows


def test_what_a_rank_said_before_it_committed_is_reported_before_that(node: CommandedNode) -> None:
    """The loop has looked at the connection already when the rank writes to it, and to its board."""
    node.agent.obey(Go(1, "1", {}, 3, 4))
    rank = node.agent.ranks[0]
    ours, theirs = socket.socketpair()
    with theirs:
        rank.disconnect()
        rank.connect(ours, node.selector, lambda: None)
        rank.state = RankState.RUNNING
        theirs.sendall(messages.encode(messages.Inexact(1, "step 4 takes another batch")))
        for each in node.agent.ranks.values():
            each.board.set_committed(4)
        node.said.clear()
        node.tick()
    assert [type(said) for said in node.said[:2]] == [messages.Inexact, Progress]
    assert node.said[0] == messages.Inexact(1, "step 4 takes another batch", rank=0, incarnation=0, committed=4)


def test_a_kill_of_who_hangs_spares_who_has_moved(node: CommandedNode) -> None:
    node.agent.obey(Go(0, None, {}, -1, -1))
    board = node.agent.ranks[1].board
    board.beat()
    node.agent.obey(Kill(1, 0, 0, board.read().beat - 1))
    assert node.starter.signals == []
    node.agent.obey(Kill(1, 0, 0, board.read().beat))
    assert node.starter.signals == [(1001, signal.SIGKILL)]


# ---- the coordinator is another one


def test_what_a_new_coordinator_is_told(node: CommandedNode) -> None:
    node.agent.obey(Go(4, "3", {}, 11, 12))
    node.agent.ranks[1].board.begin_step(12)
    node.ends(0)
    (ended,) = [message for message in node.said if isinstance(message, RankEnded)]
    node.said.clear()
    standing = node.agent.standing()
    assert node.said == [ended]  # again, since the first one may be lost
    states = [RankState.GONE, RankState.STARTING]
    ranks = [messages.RankStanding(rank, 0, states[rank], -1, (-1, 12)[rank]) for rank in (0, 1)]
    assert standing == messages.Standing(4, 3, 11, "", False, ranks)


def test_processes_that_are_no_longer_wanted_end_in_silence_and_the_node_joins_again(node: CommandedNode) -> None:
    node.said.clear()
    node.agent.obey(messages.Discard())
    assert node.starter.signals == [(1000, signal.SIGKILL), (1001, signal.SIGKILL)]
    node.ends(0)
    assert node.said == []
    node.ends(1)
    assert node.said == [messages.Joined()]
    node.agent.obey(Spawn(1, 3, 5, "2", {}))
    node.tick()
    node.ends(1, 9)
    assert isinstance(node.said[-1], RankEnded)


def test_a_displaced_node_keeps_its_processes_until_they_are_discarded(node: CommandedNode) -> None:
    node.said.clear()
    node.agent.obey(messages.Displaced())
    assert (node.agent.takes_part, node.agent.has_moved, node.starter.signals) == (False, True, [])
    node.agent.obey(messages.Discard(moved=True))
    assert [pid for pid, _ in node.starter.signals] == [1000, 1001]
    node.ends(0)
    node.ends(1)
    assert node.said == [messages.Joined()]


def test_a_refused_drain_is_asked_for_again(tmp_path: Path) -> None:
    now_s = [0.0]
    node = CommandedNode(tmp_path, clock=lambda: now_s[0], on_sigterm="drain", node_rank=1, **SEVERAL)
    node.agent.takes_part, node.agent._hosts = True, False
    node.agent.interrupted(signal.SIGTERM)
    node.agent.obey(messages.MoveNews("no spare is free", True))
    for now_s[0] in (30.0, 61.0, 62.0):
        node.agent.tick(now_s[0])
    assert sum(isinstance(message, messages.MoveWanted) for message in node.said) == 2
    node.agent.standing()  # for a coordinator that knows nothing of it
    node.agent.tick(now_s[0] + 61.0)
    assert sum(isinstance(message, messages.MoveWanted) for message in node.said) == 3
    node.agent.interrupted(signal.SIGTERM)
    assert node.agent.job.outcome is not None
    node.close()


def test_ranks_hear_only_of_their_own_source(node: CommandedNode) -> None:
    begin = Go(1, None, {"A": "b"}, 4, 5, 0, {"0": "secret of 0", "7": "secret of 7"})
    sent = {number: list[Any]() for number in node.agent.ranks}
    for number, rank in node.agent.ranks.items():
        rank.state = RankState.READY
        rank.send = lambda message, to=sent[number]: bool(to.append(message)) or True  # type: ignore[method-assign, misc]
    node.agent.obey(begin)
    envs = [go.env for (go,) in sent.values()]
    assert envs == [{"A": "b", SOURCE_ENV: "secret of 0"}, {"A": "b", SOURCE_ENV: ""}]


def test_a_process_that_is_to_be_started_again_is_left_alone(node: CommandedNode) -> None:
    node.said.clear()
    node.agent.obey(Spawn(1, 0, 0, "", {}))
    node.tick()
    assert (node.starter.signals, node.agent.ranks[1].state) == ([], RankState.STARTING)
    node.ends(1)
    assert ([message.type for message in node.said], node.agent.ranks[1].state) == (["ended"], RankState.GONE)


def test_a_process_whose_successor_is_to_be_started_is_killed_first(node: CommandedNode) -> None:
    node.agent.obey(Spawn(1, 2, 3, "2", {}))
    assert node.starter.signals == [(1001, signal.SIGKILL)]
    node.ends(1)
    assert [message.incarnation for message in node.said if isinstance(message, RankEnded)] == [0]
    rank = node.agent.ranks[1]
    assert (rank.incarnation, rank.state) == (2, RankState.STARTING)
    node.tick()
    assert rank.pid == 1001
    node.ends(1)
    assert rank.state is RankState.GONE


def test_a_successor_is_forgotten_with_the_processes_that_are_discarded(node: CommandedNode) -> None:
    node.agent.obey(Spawn(1, 2, 3, "2", {}))
    node.agent.obey(messages.Discard())
    node.ends(0)
    node.ends(1)
    node.tick()
    assert (node.agent.alive(), node.said[-1]) == ([], messages.Joined())


class Rank:
    def __init__(self) -> None:
        self.number, self.pid, self.state, self.beats = 3, os.getpid(), RankState.RUNNING, _Beats(7, 7, 100.0)
        self.reading = BoardReading(7, 5, 4, 0)
        self.board = SimpleNamespace(read=lambda: self.reading)


def test_a_silence_counts_what_passed_while_the_agent_did_not_run_but_its_limit_does_not() -> None:
    told: list[messages.NodeMessage] = []
    watch, rank = _BeatWatch(Heartbeat(10.0), told.append), cast(Any, Rank())
    ranks: list[LocalRank] = [rank]
    rank.beats.seen_at_s = time.monotonic() - 60  # the agent was stopped for most of it, and its clock stood still
    watch.look(ranks, 0, now_s=106.0)
    ((silent,),) = [message.ranks for message in told if isinstance(message, Silent)]
    assert silent.age_ms == 6000
    assert 60_000 <= silent.quiet_ms < 120_000
    rank.reading = BoardReading(8, 6, 5, 0)
    watch.look(ranks, 0, now_s=107.0)
    assert time.monotonic() - rank.beats.seen_at_s < 50
    assert watch.newest == 5


def test_a_board_that_still_shows_the_generation_before_says_nothing_of_what_this_one_began_after() -> None:
    told: list[messages.NodeMessage] = []
    watch, rank = _BeatWatch(Heartbeat(10.0), told.append), cast(Any, Rank())
    rank.reading = BoardReading(7, 5, 4, 0, began_after=0)
    watch.begin(5, 4)
    watch.look([rank], 1, now_s=101.0)
    rank.reading = BoardReading(8, 5, 3, 1, began_after=3)
    watch.look([rank], 1, now_s=110.0)
    found = [(progress.generation, progress.began_after) for progress in told if isinstance(progress, Progress)]
    assert found == [(1, -1), (1, 3)]
