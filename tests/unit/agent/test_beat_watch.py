"""Test what a node reports of ranks without progress."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

from checkpointless.launcher.agent.node import _BeatWatch
from checkpointless.launcher.agent.ranks.process_keeper import LocalRank, _Beats
from checkpointless.launcher.coordinator.job_config import Heartbeat
from checkpointless.launcher.protocol.board import BoardReading
from checkpointless.launcher.protocol.messages import NodeMessage, Progress, RankState, Silent


class Rank:
    def __init__(self) -> None:
        self.number, self.pid, self.state, self.beats = 3, os.getpid(), RankState.RUNNING, _Beats(7, 7, 100.0)
        self.reading = BoardReading(7, 5, 4, 0)
        self.board = SimpleNamespace(read=lambda: self.reading)


def test_a_silence_counts_what_passed_while_the_agent_did_not_run_but_its_limit_does_not() -> None:
    told: list[NodeMessage] = []
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
    told: list[NodeMessage] = []
    watch, rank = _BeatWatch(Heartbeat(10.0), told.append), cast(Any, Rank())
    rank.reading = BoardReading(7, 5, 4, 0, began_after=0)
    watch.begin(5, 4)
    watch.look([rank], 1, now_s=101.0)
    rank.reading = BoardReading(8, 5, 3, 1, began_after=3)
    watch.look([rank], 1, now_s=110.0)
    found = [(progress.generation, progress.began_after) for progress in told if isinstance(progress, Progress)]
    assert found == [(1, -1), (1, 3)]
