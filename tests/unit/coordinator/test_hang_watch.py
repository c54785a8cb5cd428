"""Test what follows from ranks without progress: the pure decisions, who waits for whom, and what is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator import hang_watch
from checkpointless.launcher.coordinator.hang_watch import STEADY_LOOKS, _Finding, _judge, _Silence, _Stance
from checkpointless.launcher.coordinator.job import Phase
from checkpointless.launcher.coordinator.job_config import Heartbeat
from checkpointless.launcher.protocol.messages import Answer, FaultNotice, Inquire, Kill, Silent, SilentRank
from checkpointless.system.process_tree import ProcessState
from tests.drawn import examples
from tests.unit.messaged_job import HEARTBEAT_S, NPROC, Job

CEILING_S = 600.0
RANKS = range(8)


@pytest.mark.parametrize(("longest_s", "limit_s"), [(0, 600.0), (0.2, 30.0), (3, 30.0), (20, 200.0), (90, 600.0)])
def test_the_limit_follows_the_steps(longest_s: float, limit_s: float) -> None:
    assert Heartbeat(None).within_step_s(longest_s) == limit_s
    assert Heartbeat(5.0).within_step_s(longest_s) == 5.0


def test_the_ceiling_follows_the_pauses_unless_it_is_given() -> None:
    assert [Heartbeat(None).ceiling_s(pause_s) for pause_s in (0.0, 100.0, 500.0)] == [600.0, 600.0, 1500.0]
    assert Heartbeat(20.0).ceiling_s(500.0) == 20.0


@pytest.mark.parametrize(
    ("standing", "shared"),
    [((), False), ((3,), False), ((0, 2), False), ((0, 1), True), ((0, 2, 4), False), ((0, 2, 4, 6), True)],
)
def test_half_of_the_job_or_a_whole_node_is_a_shared_stall(standing: tuple[int, ...], shared: bool) -> None:
    assert hang_watch._is_shared(standing, 8, 2) is shared


EVIDENCE = st.builds(
    _Silence,
    st.sampled_from(_Stance),
    st.sampled_from([15.0, 29.0, 31.0, 91.0, 599.0, 601.0, 1900.0]),
    st.sampled_from([30.0, CEILING_S]),
    st.sampled_from(ProcessState),
    st.sampled_from([0.0, 0.9, 20.0]),
)


SILENT = st.dictionaries(st.sampled_from(RANKS), EVIDENCE, min_size=1)


STEADY = st.none() | st.integers(0, STEADY_LOOKS)


@examples(150)
@given(SILENT, st.sampled_from([1, 2, 4, 8]), STEADY)
def test_nobody_is_accused_who_is_one_of_many_or_waits_or_could_not_answer(
    silent: dict[int, _Silence], nproc: int, steady: int | None
) -> None:
    verdict = _judge(silent, 8, 8, nproc, CEILING_S, steady)
    standing = {rank for rank, each in silent.items() if each.stance is not _Stance.WAITS}
    assert set(verdict.ranks) <= standing
    if verdict.finding is not _Finding.CULPRITS:
        return
    assert not hang_watch._is_shared(verdict.ranks, 8, nproc)
    if hang_watch._is_shared(standing, 8, nproc):
        assert any(silent[rank].age_s >= CEILING_S for rank in standing)
        assert all(silent[rank].stance is _Stance.MUTE for rank in verdict.ranks)
        held = (ProcessState.BUSY, ProcessState.BLOCKED, ProcessState.TRACED)
        assert not any(silent[rank].state in held for rank in verdict.ranks)
    for rank in verdict.ranks:
        each = silent[rank]
        assert each.age_s >= each.limit_s
        if each.stance is _Stance.MUTE:
            assert each.mute_s >= hang_watch._grace_s(each.limit_s)
            assert each.state is not ProcessState.BUSY or each.age_s >= hang_watch.BUSY_TIMES * each.limit_s
            blocked = each.state in (ProcessState.BLOCKED, ProcessState.TRACED)
            assert not blocked or each.age_s >= CEILING_S
    if steady is not None:
        assert steady >= STEADY_LOOKS
        assert len(standing) < len(silent)


@given(SILENT, st.sampled_from([1, 2, 4, 8]))
def test_no_silence_is_waited_for_for_ever(silent: dict[int, _Silence], nproc: int) -> None:
    """Who stays where it is leads to an incident in the end, whatever it is."""
    old = {rank: _Silence(e.stance, 1e5, e.limit_s, e.state, 1e5) for rank, e in silent.items()}
    verdict = _judge(old, 8, 8, nproc, CEILING_S)
    assert verdict.finding in (_Finding.CULPRITS, _Finding.TOO_LONG, _Finding.ALL_WAIT)


@given(SILENT, st.sampled_from([1, 2, 4, 8]), st.integers(0, STEADY_LOOKS - 1))
def test_without_progress_one_look_is_no_evidence(silent: dict[int, _Silence], nproc: int, steady: int) -> None:
    verdict = _judge(silent, 8, 8, nproc, CEILING_S, steady)
    assert verdict.finding in (_Finding.NOTHING, _Finding.ASK_AGAIN)


@pytest.mark.parametrize("unclear", [1, 2, 8])
@pytest.mark.parametrize("age_s", [31.0, 599.0, 601.0])
def test_ranks_that_may_wait_for_their_devices_are_given_time_until_the_ceiling(unclear: int, age_s: float) -> None:
    silent = {
        rank: _Silence(_Stance.UNCLEAR if rank < unclear else _Stance.WAITS, age_s, 30.0, ProcessState.BUSY)
        for rank in RANKS
    }
    found = _judge(silent, 8, 8, 2, CEILING_S)
    assert found.finding is (_Finding.WAIT if age_s < CEILING_S else _Finding.TOO_LONG)
    assert found.ranks == tuple(range(unclear))


def test_the_one_that_is_known_to_be_behind_is_accused_beside_those_that_may_wait() -> None:
    silent = {rank: _Silence(_Stance.WAITS, 31.0, 30.0) for rank in RANKS}
    silent[3] = _Silence(_Stance.UNCLEAR, 31.0, 30.0)
    silent[5] = _Silence(_Stance.ELSEWHERE, 31.0, 30.0)
    found = _judge(silent, 8, 8, 2, CEILING_S)
    assert (found.finding, found.ranks) == (_Finding.CULPRITS, (5,))


@pytest.mark.parametrize("age_s", [599.0, 601.0])
@pytest.mark.parametrize(
    ("mute", "state", "gone"),
    [
        ((1,), ProcessState.STOPPED, (1,)),
        ((1,), ProcessState.BLOCKED, ()),
        ((1,), ProcessState.BUSY, ()),
        ((1, 4), ProcessState.UNKNOWN, (1, 4)),
        ((0, 1), ProcessState.STOPPED, ()),
        ((1, 3, 5, 7), ProcessState.STOPPED, ()),
    ],
)
def test_of_a_stall_that_took_too_long_the_few_that_do_not_answer_are_given_up(
    age_s: float, mute: tuple[int, ...], state: ProcessState, gone: tuple[int, ...]
) -> None:
    """On GPUs a rank that does not answer leaves unclear what its peers wait for; half of a job may be paused."""
    silent = {rank: _Silence(_Stance.UNCLEAR, age_s, 30.0) for rank in RANKS}
    silent |= {rank: _Silence(_Stance.MUTE, age_s, 30.0, state, mute_s=20.0) for rank in mute}
    found = _judge(silent, 8, 8, 2, CEILING_S)
    if age_s < CEILING_S:
        assert found.finding is _Finding.WAIT
    else:
        blamed = (_Finding.CULPRITS, gone) if gone else (_Finding.TOO_LONG, tuple(RANKS))
        assert (found.finding, found.ranks) == blamed


WAITS, ELSEWHERE, UNCLEAR = _Stance.WAITS, _Stance.ELSEWHERE, _Stance.UNCLEAR


def on_gpus(launched: Mapping[int, Mapping[str, int]], is_complete: bool = True) -> dict[int, _Stance]:
    answers = {rank: Answer(0, False, "", True, dict(each)) for rank, each in launched.items()}
    return hang_watch._stances_of(answers, is_complete)


def test_who_waits_for_one_that_waits_is_no_culprit() -> None:
    """Rank 3 hangs; rank 2 waits for it in their tensor-parallel group, and ranks 0 and 1 for rank 2 or 3."""
    launched = {
        0: {"world": 10, "tp 0": 5, "dp 0": 4},
        1: {"world": 10, "tp 0": 5, "dp 1": 4},
        2: {"world": 10, "tp 1": 5, "dp 0": 3},
        3: {"world": 10, "tp 1": 4, "dp 1": 3},
    }
    assert on_gpus(launched) == {0: WAITS, 1: WAITS, 2: WAITS, 3: ELSEWHERE}


def test_a_stage_of_a_pipeline_is_waited_for_by_its_neighbours() -> None:
    """Stage 1 hangs: stage 0 wants to send to it again, stage 2 to receive from it."""
    launched = {
        0: {"world": 3, "pp/0>1": 5},
        1: {"world": 3, "pp/0>1": 4, "pp/1>2": 3},
        2: {"world": 3, "pp/1>2": 4, "pp/2>3": 3},
        3: {"world": 3, "pp/2>3": 4},
        4: {"world": 4},
    }
    assert on_gpus(launched) == {0: WAITS, 1: ELSEWHERE, 2: WAITS, 3: WAITS, 4: WAITS}


@pytest.mark.parametrize(
    "launched",
    [
        {0: {"0": 4}, 1: {"0": 4}},  # the network, perhaps
        {0: {}, 1: {}},
        {0: {"0": 4}, 1: {"0": 4}, 2: {"0": 5}},  # they may wait for each other in what nobody counts
    ],
)
def test_without_evidence_nobody_is_accused(launched: Mapping[int, Mapping[str, int]]) -> None:
    assert ELSEWHERE not in on_gpus(launched).values()


def test_who_is_behind_may_wait_for_one_that_has_not_answered() -> None:
    """Rank 1 waits for rank 2, which still beats and was not asked, and rank 0 waits for rank 1."""
    assert on_gpus({0: {"a": 5}, 1: {"a": 4, "b": 3}}, is_complete=False) == {0: WAITS, 1: UNCLEAR}


def test_where_calls_return_when_they_are_done_the_stack_is_the_evidence() -> None:
    answers = {0: Answer(0, True, "", False, {"0": 5}), 1: Answer(0, False, "", False, {"0": 5})}
    assert hang_watch._stances_of(answers, is_complete=False) == {0: WAITS, 1: ELSEWHERE}


def pairs(launched: Mapping[int, Mapping[str, int]], rank: int) -> list[tuple[int, int]]:
    """Return each count of a rank, paired with that of each rank in the same group."""
    return [
        (count, other[group])
        for group, count in launched[rank].items()
        for other in launched.values()
        if group in other
    ]


@given(
    st.dictionaries(
        st.integers(0, 6), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3), max_size=3), max_size=7
    )
)
def test_who_is_behind_is_waited_for_and_waits_for_nobody(launched: Mapping[int, Mapping[str, int]]) -> None:
    waiting, late = hang_watch._ahead_and_behind(launched)
    assert not waiting & late
    assert late <= set(launched)
    for rank in late:
        assert any(theirs > mine for mine, theirs in pairs(launched, rank))
    for rank in waiting:
        assert any(theirs < mine for mine, theirs in pairs(launched, rank))


def silent(job: Job, *rows: tuple[int, float, bool], beat: int = 7, letter: str = "S") -> None:
    """Have nodes report ranks: number, for how many seconds they are silent, whether they are within step 4."""
    for node in job.coordinator.nodes:
        ranks = [
            SilentRank(rank, beat, int(1000 * age_s), int(1000 * age_s), 4, in_step, ord(letter), 0)
            for rank, age_s, in_step in rows
            if rank // NPROC == node.index
        ]
        job.hear(node, Silent(ranks))


def silence(job: Job, *ranks: int, beat: int = 7, age_s: float = HEARTBEAT_S + 0.1, letter: str = "S") -> None:
    silent(job, *((rank, age_s, False) for rank in ranks), beat=beat, letter=letter)


def notices(job: Job, at_least_s: float = HEARTBEAT_S) -> list[tuple[int, FaultNotice]]:
    """Take the notices; the hang counts from the last progress."""
    incident = job.coordinator.job.incidents.open
    assert incident is not None
    assert at_least_s <= (incident.undetected_s or -1.0) < at_least_s + 60
    return job.take(FaultNotice)


def wait_in_silence(job: Job, *ranks: int, seconds: float = 6.0, letter: str = "S") -> None:
    """Let time pass, in which these ranks stay where they are."""
    for _ in range(int(seconds)):
        job.later_s += 1.0
        silence(job, *ranks, age_s=HEARTBEAT_S + job.later_s, letter=letter)
        job.tick()


def answer(job: Job, *elsewhere: int, stack: str = "a stack") -> None:
    """Have the ranks that are asked answer: all wait in a collective but those that are ``elsewhere``."""
    for _, ask in job.take(Inquire):
        for rank in ask.ranks:
            job.tell(rank, Answer(ask.id, rank not in elsewhere, stack, rank=rank))
    job.tick()


def test_who_waits_in_no_collective_is_asked_to_leave_and_replaced_if_it_does_not() -> None:
    job = Job(nnodes=3).begin()
    job.progress(3)
    silence(job, 0, 4, 5)
    job.tick()
    assert job.take(Inquire) == [(0, Inquire(1, [0])), (2, Inquire(1, [4, 5]))]
    job.tell(0, Answer(1, True, "in a collective", rank=0))
    job.tell(4, Answer(1, False, "elsewhere", rank=4))
    job.tick()
    assert job.take(FaultNotice) == []
    job.tell(5, Answer(1, True, "in a collective", rank=5))
    job.tick()
    cause = "rank 4 made no progress for 10 s at step 4"
    assert notices(job) == [(node, FaultNotice(0, "1", cause, 4)) for node in (0, 1, 2)]
    job.later_s = 4.9
    job.tick()
    assert job.take(Kill) == []
    job.later_s = 5.1
    job.tick()
    assert job.take(Kill) == [(2, Kill(4, 0, 0, 7))]
    job.ends(4, forgiven=True)
    job.ready(*job.ranks)
    assert job.begun() == [1, 1, 1]


def test_who_does_not_answer_again_and_again_hangs(job: Job) -> None:
    job.progress(3)
    silence(job, 3)
    job.tick()
    wait_in_silence(job, 3, seconds=4)
    assert len(job.take(Inquire)) >= 3
    assert job.take(FaultNotice) == []
    wait_in_silence(job, 3, seconds=2)
    assert job.take(Kill) == [(1, Kill(3, 0, 0, 7))]


@pytest.mark.parametrize("letter", ["R", "D", "t"])
def test_who_cannot_answer_is_waited_for(job: Job, letter: str) -> None:
    job.progress(3)
    wait_in_silence(job, 3, seconds=15, letter=letter)
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])
    assert "rank 3 of 4 has made no progress" in job.said[0]
    wait_in_silence(job, 3, seconds=10, letter=letter)
    assert job.take(Kill) == [(1, Kill(3, 0, 0, 7))]


def test_a_node_that_has_not_spoken_of_its_ranks_since_does_not_accuse_them(job: Job) -> None:
    job.progress(3)
    silence(job, 3)
    job.tick()
    for _ in range(20):
        job.later_s += 1.0
        job.tick()
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (1, 2), (2, 3)])
def test_a_stall_that_many_share_is_waited_for_and_told(ranks: tuple[int, ...]) -> None:
    job = stalled(ranks, range(28, 120))
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])
    (told,) = [line for line in job.said if "made no progress" in line]
    assert "read in data.py:31" in told


def test_a_shared_stall_beyond_the_ceiling_is_an_incident_in_which_nobody_is_killed() -> None:
    job = stalled((0, 1, 2, 3), range(30, 610))
    assert "incident 1: ranks 0-3 made no progress for 600 s at step 4" in job.said[-1]
    assert (len(job.take(FaultNotice)), job.take(Kill)) == (2, [])
    job.ready(*job.ranks)
    assert job.begun() == [1, 1]


def stalled(ranks: Sequence[int], ages_s: Iterable[int]) -> Job:
    """Return a job whose ``ranks`` make no progress in step 4 and answer so; the others wait in a collective."""
    job = Job(heartbeat_timeout_s=None).begin()
    job.progress(3, longest_ms=1000)
    for age_s in ages_s:
        job.later_s += 1.0
        if job.outcome is None and job.coordinator.job.phase is Phase.RUNNING:
            silent(job, *((rank, age_s, True) for rank in job.ranks))
            job.tick()
            answer(job, *ranks, stack='File "/a/data.py", line 31, in read\n    file.read()\n')
    return job


def test_ranks_that_all_wait_for_each_other_leave_together_and_nobody_is_killed(job: Job) -> None:
    silence(job, *job.ranks)
    job.tick()
    answer(job)
    cause = "ranks waited for each other with no progress for 10 s at step 4"
    assert job.take(FaultNotice) == []  # nobody has ever shown progress
    job.progress(3)
    wait_in_silence(job, *job.ranks, seconds=2)
    answer(job)
    assert (notices(job), job.take(Kill)) == ([(node, FaultNotice(0, "1", cause, None)) for node in (0, 1)], [])


@pytest.mark.parametrize("again", [(), (3,)])
def test_a_rank_that_moved_on_since_it_was_asked_is_left_alone(job: Job, again: tuple[int, ...]) -> None:
    job.progress(3)
    silence(job, 3)
    job.tick()
    silence(job, *again, beat=8, age_s=HEARTBEAT_S * 0.95)
    job.tell(3, Answer(1, False, "elsewhere", rank=3))
    job.tick()
    assert (job.take(FaultNotice), job.take(Kill)) == ([], [])


def test_a_rank_in_a_step_has_the_limit_of_steps_and_one_that_writes_a_checkpoint_more() -> None:
    job = Job(nnodes=4, heartbeat_timeout_s=None).begin()
    job.progress(3, longest_ms=2000)
    silent(job, (0, 29.0, True), (1, 28.5, True), (2, 28.5, True))
    job.tick()
    assert job.take(Inquire) == []
    silent(job, (0, 30.1, True), (1, 29.6, True), (2, 29.6, True), (3, 100.0, False))
    job.tick()
    assert job.take(Inquire) == [(0, Inquire(1, [0, 1])), (1, Inquire(1, [2]))]
    answer(job, 0)
    assert [notice.cause for _, notice in notices(job, 30.0)] == ["rank 0 made no progress for 30 s at step 4"] * 4


def test_a_rank_that_stays_idle_while_others_wait_hangs_also_before_anybody_showed_progress() -> None:
    job = Job(nnodes=4).begin()
    looks = 0
    while not job.take(FaultNotice) and looks < 30:
        looks += 1
        job.later_s += 0.5
        silence(job, *job.ranks, age_s=HEARTBEAT_S + job.later_s)
        job.tick()
        answer(job, 0)
    assert job.later_s > STEADY_LOOKS
    assert job.said == ["incident 1: rank 0 made no progress for 10 s at step 4; recovering"]
