"""Who hangs and who is waited for: the policy over all that can be known, and the watch that gathers it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointless.coordinator.hang_watch import Hang, HangWatch, Stall
from checkpointless.coordinator.hangs import (
    BUSY_TIMES,
    MOST_GRACE_S,
    STEADY_LOOKS,
    Evidence,
    Finding,
    Heartbeat,
    Stance,
    grace_s,
    is_shared,
    judge,
    stalled,
)
from checkpointless.posix.awake_clock import AwakeClock
from checkpointless.posix.process_state import ProcessLook, ProcessState, state_of

CEILING_S = 600.0
RANKS = range(8)


def test_nobody_is_asked_while_all_make_progress() -> None:
    assert stalled({}, {}) == ()
    assert stalled({0: 9.9, 1: 0.0}, dict.fromkeys(range(2), 10.0)) == ()
    assert stalled({0: 6.0, 1: 10.1, 2: 3.0}, dict.fromkeys(range(3), 10.0)) == (0, 1)


@pytest.mark.parametrize(
    ("longest_s", "limit_s"), [(0.0, 600.0), (0.2, 30.0), (3.0, 30.0), (20.0, 200.0), (90.0, 600.0)]
)
def test_the_limit_follows_the_steps(longest_s: float, limit_s: float) -> None:
    assert Heartbeat.of(None).within_step_s(longest_s) == limit_s
    assert Heartbeat.of(5.0).within_step_s(longest_s) == 5.0


def test_the_ceiling_follows_the_pauses_unless_it_is_given() -> None:
    assert [Heartbeat.of(None).ceiling_s(pause_s) for pause_s in (0.0, 100.0, 500.0)] == [600.0, 600.0, 1500.0]
    assert Heartbeat.of(20.0).ceiling_s(500.0) == 20.0


@pytest.mark.parametrize(
    ("standing", "shared"),
    [((), False), ((3,), False), ((0, 2), False), ((0, 1), True), ((0, 2, 4), False), ((0, 2, 4, 6), True)],
)
def test_half_of_the_job_or_a_whole_node_is_a_shared_stall(standing: tuple[int, ...], shared: bool) -> None:
    assert is_shared(standing, 8, 2) is shared


def test_one_of_two_ranks_hangs_by_itself_and_one_of_one_does_not() -> None:
    assert not is_shared((0,), 2, 2)
    assert not is_shared((0,), 2, 1)
    assert is_shared((0,), 1, 1)


def test_the_last_rank_in_its_block_hangs_by_itself() -> None:
    silent = {0: Evidence(Stance.ELSEWHERE, 31.0, 30.0)}
    assert judge(silent, 1, 8, 2, CEILING_S).ranks == (0,)


EVIDENCE = st.builds(
    Evidence,
    st.sampled_from(Stance),
    st.sampled_from([15.0, 29.0, 31.0, 91.0, 599.0, 601.0, 1900.0]),
    st.sampled_from([30.0, CEILING_S]),
    st.sampled_from(ProcessState),
    st.sampled_from([0.0, 0.9, 20.0]),
)
SILENT = st.dictionaries(st.sampled_from(RANKS), EVIDENCE, min_size=1)
STEADY = st.none() | st.integers(0, STEADY_LOOKS)


@settings(max_examples=500)
@given(SILENT, st.sampled_from([1, 2, 4, 8]), STEADY)
def test_nobody_is_accused_who_is_one_of_many_or_waits_or_could_not_answer(
    silent: dict[int, Evidence], nproc: int, steady: int | None
) -> None:
    diagnosis = judge(silent, 8, 8, nproc, CEILING_S, steady)
    standing = {rank for rank, each in silent.items() if each.stance is not Stance.WAITS}
    assert set(diagnosis.ranks) <= standing
    if diagnosis.finding is not Finding.CULPRITS:
        return
    assert not is_shared(standing, 8, nproc)
    for rank in diagnosis.ranks:
        each = silent[rank]
        assert each.age_s >= each.limit_s
        if each.stance is Stance.MUTE:
            assert each.mute_s >= grace_s(each.limit_s)
            assert each.state is not ProcessState.BUSY or each.age_s >= BUSY_TIMES * each.limit_s
            blocked = each.state in (ProcessState.BLOCKED, ProcessState.TRACED)
            assert not blocked or each.age_s >= CEILING_S
    if steady is not None:
        assert steady >= STEADY_LOOKS
        assert len(standing) < len(silent)


@given(SILENT, st.sampled_from([1, 2, 4, 8]))
def test_no_silence_is_waited_for_for_ever(silent: dict[int, Evidence], nproc: int) -> None:
    """Who stays where it is leads to an incident in the end, whatever it is."""
    old = {rank: Evidence(e.stance, 1e5, e.limit_s, e.state, 1e5) for rank, e in silent.items()}
    diagnosis = judge(old, 8, 8, nproc, CEILING_S)
    assert diagnosis.finding in (Finding.CULPRITS, Finding.TOO_LONG, Finding.ALL_WAIT)


@given(SILENT, st.sampled_from([1, 2, 4, 8]), st.integers(0, STEADY_LOOKS - 1))
def test_where_nobody_shows_progress_one_look_is_no_evidence(
    silent: dict[int, Evidence], nproc: int, steady: int
) -> None:
    diagnosis = judge(silent, 8, 8, nproc, CEILING_S, steady)
    assert diagnosis.finding in (Finding.NOTHING, Finding.ASK_AGAIN)


def test_a_grace_is_short_and_in_proportion() -> None:
    assert [grace_s(limit_s) for limit_s in (1.0, 4.0, 30.0, 600.0)] == [1.0, 2.0, MOST_GRACE_S, MOST_GRACE_S]


# ---- the watch


class Watched:
    """Eight ranks on nodes of two, of which the last seven wait for the first."""

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
            rows = [[rank, 7, int(age_s * 1000), 12, in_step, ord(letter), 0] for rank, age_s, in_step in mine]
            self.watch.hear(node, rows, longest_s, self.now_s)

    def answer(self, *ranks: int, elsewhere: tuple[int, ...] = ()) -> None:
        for rank in (*ranks, *elsewhere):
            self.watch.answered(len(self.asked), rank, rank not in elsewhere, "a stack")

    def look(self) -> list[Hang]:
        return self.watch.look(RANKS, self.now_s)


def test_a_rank_that_is_silent_in_a_step_is_found_at_the_limit_of_steps() -> None:
    watched = Watched()
    watched.silent((0, 29.0, 1), (1, 28.5, 1), (2, 28.5, 1))
    assert (watched.look(), watched.asked) == ([], [])
    watched.silent((0, 30.1, 1), (1, 29.6, 1), (2, 29.6, 1))
    assert (watched.look(), watched.asked) == ([], [[0, 1, 2]])
    watched.answer(1, 2, elsewhere=(0,))
    assert watched.look() == [Hang(0, 30.0, 12, "a stack", 7, MOST_GRACE_S)]


def test_a_rank_that_writes_a_checkpoint_has_its_time_and_so_have_those_that_wait_for_it() -> None:
    watched = Watched()
    watched.silent((0, 100.0, 0), (1, 99.0, 1), (2, 99.0, 1))
    assert (watched.look(), watched.asked) == ([], [[1, 2]])
    watched.answer(1, 2)
    assert watched.look() == []


def test_until_every_node_knows_how_long_a_step_takes_the_ceiling_holds() -> None:
    watched = Watched()
    watched.silent((0, 599.0, 1), longest_s=0.0)
    assert (watched.look(), watched.asked) == ([], [])
    watched.silent((0, 600.5, 1), longest_s=0.0)
    assert (watched.look(), watched.asked) == ([], [[0]])


def test_who_does_not_answer_is_asked_again_until_its_grace_is_over() -> None:
    watched = Watched()
    found: list[Hang] = []
    while not found and watched.now_s < 1030.0:
        watched.silent((0, 30.1 + watched.now_s - 1000.0, 1))
        found = watched.look()
        watched.now_s += 0.1
    assert MOST_GRACE_S <= watched.now_s - 1000.0 <= MOST_GRACE_S + 0.5
    assert len(watched.asked) >= 10
    assert found == [Hang(0, 30.0, 12, "no answer; idle", 7, 0.0)]


def test_a_rank_that_is_found_alone_and_idle_again_and_again_hangs_also_before_anybody_showed_progress() -> None:
    watched = Watched(limit_s=10.0)
    watched.watch.shows_progress = False
    found: list[Hang] = []
    while not found and watched.now_s < 1030.0:
        watched.silent(*((rank, 10.1 + watched.now_s - 1000.0, 0) for rank in RANKS))
        found = watched.look()
        if watched.asked:
            watched.answer(*RANKS[1:], elsewhere=(0,))
        watched.now_s += 0.1
    assert watched.now_s > 1000.0 + STEADY_LOOKS
    assert [hang.rank for hang in found] == [0]


def test_ranks_that_change_places_do_not_hang_although_they_never_show_progress() -> None:
    watched = Watched(limit_s=10.0)
    watched.watch.shows_progress = False
    for _ in range(600):
        watched.silent(*((rank, 10.1 + watched.now_s - 1000.0, 0) for rank in RANKS))
        assert watched.look() == []
        outside = len(watched.asked) % 3
        watched.answer(*(rank for rank in RANKS if rank != outside), elsewhere=(outside,))
        watched.now_s += 0.1


# ---- clocks and processes


def test_a_clock_does_not_count_its_own_pauses() -> None:
    times = iter([0.0, 0.1, 0.2, 7.2, 7.3, 7.2])
    clock = AwakeClock(0.5, lambda: next(times))
    assert [round(clock(), 3) for _ in range(5)] == [0.1, 0.2, 0.7, 0.8, 0.8]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield made
    made.kill()
    made.wait()


def _until(process: subprocess.Popen[bytes], state: ProcessState) -> None:
    deadline = time.monotonic() + 30
    while True:
        first = ProcessLook.at(process.pid)
        time.sleep(0.2)
        if state_of(first, ProcessLook.at(process.pid), 0.2) is state:
            return
        assert time.monotonic() < deadline, state


def test_a_process_that_sleeps_or_is_stopped_is_seen(process: subprocess.Popen[bytes]) -> None:
    _until(process, ProcessState.IDLE)
    os.kill(process.pid, signal.SIGSTOP)
    _until(process, ProcessState.STOPPED)
    os.kill(process.pid, signal.SIGCONT)
    _until(process, ProcessState.IDLE)


def test_what_the_kernel_says_of_a_process() -> None:
    def seen(letter: str, cpu_ms: int = 0) -> ProcessState:
        return state_of(ProcessLook(ord(letter), 0), ProcessLook(ord(letter), cpu_ms), 1.0)

    assert [seen(letter) for letter in "TtDRSI"] == [
        ProcessState.STOPPED,
        ProcessState.TRACED,
        ProcessState.BLOCKED,
        ProcessState.BUSY,
        ProcessState.IDLE,
        ProcessState.IDLE,
    ]
    assert seen("S", 500) is ProcessState.BUSY
    assert state_of(ProcessLook(), ProcessLook(), 1.0) is ProcessState.UNKNOWN
    assert ProcessLook.at(None) == ProcessLook()
    assert ProcessLook.at(os.getpid()).cpu_ms > 0
