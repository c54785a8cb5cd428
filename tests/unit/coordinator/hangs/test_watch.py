"""Test the watch over ranks without progress."""

from __future__ import annotations

import time

from checkpointless.launcher.coordinator.hang_watch import (
    MOST_GRACE_S,
    STEADY_LOOKS,
    HangWatch,
    Heartbeat,
    Stall,
    _Hang,
)
from checkpointless.launcher.protocol.messages import Answer, SilentRank

RANKS = range(8)


class Watched:
    """Watches eight ranks on nodes of two, by a clock of the test's own."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.asked: list[list[int]] = []
        self.told: list[Stall] = []
        ask = lambda question, ranks: self.asked.append(ranks)  # noqa: E731
        self.watch = HangWatch(Heartbeat.of(limit_s), 8, 2, ask, self.told.append)
        self.watch.shows_progress = True
        self.now_s = 1000.0

    def silent(self, *ranks: tuple[int, float, int], longest_s: float = 2.0, letter: str = "S") -> None:
        for node in range(4):
            mine = [row for row in ranks if row[0] // 2 == node]
            rows = [
                SilentRank(rank, 7, int(age_s * 1000), int(age_s * 1000), 12, bool(in_step), ord(letter), 0)
                for rank, age_s, in_step in mine
            ]
            self.watch.hear(node, rows, longest_s, self.now_s)

    def answer(self, *ranks: int, elsewhere: tuple[int, ...] = ()) -> None:
        for rank in (*ranks, *elsewhere):
            self.watch.answered(rank, Answer(len(self.asked), rank not in elsewhere, "a stack"))

    def look(self) -> list[_Hang]:
        return self.watch.look(RANKS, self.now_s)


def test_a_rank_that_is_silent_in_a_step_is_found_at_the_limit_of_steps() -> None:
    watched = Watched()
    watched.silent((0, 29.0, 1), (1, 28.5, 1), (2, 28.5, 1))
    assert (watched.look(), watched.asked) == ([], [])
    watched.silent((0, 30.1, 1), (1, 29.6, 1), (2, 29.6, 1))
    assert (watched.look(), watched.asked) == ([], [[0, 1, 2]])
    watched.answer(1, 2, elsewhere=(0,))
    (hang,) = watched.look()
    assert hang == _Hang(0, 30.0, hang.since_s, 12, "a stack", 7, MOST_GRACE_S)
    assert time.monotonic() - 90 < hang.since_s <= time.monotonic() - 30.1  # since the culprit's last progress


def test_a_rank_that_writes_a_checkpoint_has_its_time_and_so_have_those_that_wait_for_it() -> None:
    watched = Watched()
    watched.silent((0, 100.0, 0), (1, 99.0, 1), (2, 99.0, 1))
    assert (watched.look(), watched.asked) == ([], [[1, 2]])
    watched.answer(1, 2)
    assert watched.look() == []


def test_who_does_not_answer_is_asked_again_until_its_grace_is_over() -> None:
    watched = Watched()
    found: list[_Hang] = []
    while not found and watched.now_s < 1030.0:
        watched.silent((0, 30.1 + watched.now_s - 1000.0, 1))
        found = watched.look()
        watched.now_s += 0.1
    assert MOST_GRACE_S <= watched.now_s - 1000.0 <= MOST_GRACE_S + 0.5
    assert len(watched.asked) >= 10
    assert found == [_Hang(0, 30.0, found[0].since_s, 12, "no answer; idle", 7, 0.0)]


def test_a_rank_that_is_found_alone_and_idle_again_and_again_hangs_also_before_anybody_showed_progress() -> None:
    watched = Watched(limit_s=10.0)
    watched.watch.shows_progress = False
    found: list[_Hang] = []
    while not found and watched.now_s < 1030.0:
        watched.silent(*((rank, 10.1 + watched.now_s - 1000.0, 0) for rank in RANKS))
        found = watched.look()
        if watched.asked:
            watched.answer(*RANKS[1:], elsewhere=(0,))
        watched.now_s += 0.1
    assert watched.now_s > 1000.0 + STEADY_LOOKS
    assert [hang.rank for hang in found] == [0]
