"""The policy of incidents: who is to blame, and when it is enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.agent.hangs import ANSWER_TIMEOUT_S, Hang, HangWatch, Heartbeat, Inquiry, judge, stalled
from checkpointless.agent.incidents import (
    NO_PROGRESS_LIMIT,
    SAME_FAILURE_LIMIT,
    Cause,
    CauseKind,
    History,
    attribute,
    culprit,
    exception_cause,
    exit_cause,
)

CAUSES = st.builds(
    Cause,
    st.sampled_from(CauseKind),
    st.integers(0, 7),
    st.just("exit"),
    st.text(max_size=5),
    st.integers(-1, 9),
)


def bug(step: int = 4, message: str = "no") -> Cause:
    return exception_cause(1, "ValueError", message, "Traceback of a bug\n", step, victim=False)


DEATH = exit_cause(2, -9, 4)
VICTIM = exception_cause(0, "DistBackendError", "Connection closed by peer", "", 4, victim=True)


@given(st.lists(CAUSES, min_size=1))
def test_the_first_of_the_strongest_causes_explains(causes: list[Cause]) -> None:
    found = attribute(causes)
    assert all(cause.kind <= found.kind for cause in causes)
    assert next(cause for cause in causes if cause.kind == found.kind) == found
    assert culprit(found) == (None if found.kind is CauseKind.VICTIM else found.rank)


def test_a_death_beats_a_bug_beats_a_victim() -> None:
    assert attribute([VICTIM, bug(), DEATH]) is DEATH
    assert attribute([VICTIM, bug()]) == bug()
    assert culprit(attribute([VICTIM])) is None
    with pytest.raises(ValueError, match="cause"):
        attribute([])


def test_what_is_said_of_a_cause() -> None:
    assert str(DEATH) == "rank 2 killed by SIGKILL at step 4"
    assert str(exit_cause(1, 3, -1)) == "rank 1 exited with code 3"
    assert str(bug(message="no\nsecond line")) == "rank 1 raised ValueError at step 4: no"


def verdicts(*incidents: tuple[Cause, int], max_incidents: int | None = None) -> list[bool]:
    """Whether each incident, given with the high water at its time, ends the job."""
    history, ends = History(max_incidents), []
    for cause, high_water in incidents:
        history, verdict = history.after(cause, high_water)
        ends.append(verdict is not None)
    return ends


def test_the_third_equal_exception_ends_the_job_with_its_traceback() -> None:
    history = History()
    for _ in range(SAME_FAILURE_LIMIT - 1):
        history, verdict = history.after(bug(), 3)
        assert verdict is None
    history, verdict = history.after(bug(), 3)
    assert verdict is not None
    assert verdict.last_words == "Traceback of a bug\n"
    assert "ValueError" in verdict.reason


def test_what_comes_in_between_does_not_reset_the_count_but_progress_does() -> None:
    assert verdicts((bug(), 3), (bug(), 3), (DEATH, 3), (bug(), 3)) == [False, False, False, True]
    assert verdicts((bug(), 3), (bug(), 3), (bug(), 4), (bug(), 4)) == [False] * 4
    assert verdicts((bug(), 3), (bug(5), 3), (bug(message="other"), 3)) == [False] * 3


@given(st.lists(st.sampled_from([DEATH, VICTIM]), min_size=12, max_size=12))
def test_incidents_without_progress_end_the_job(causes: list[Cause]) -> None:
    ends = verdicts(*((cause, 3) for cause in causes))
    assert ends.index(True) == NO_PROGRESS_LIMIT - 1


@given(st.lists(st.tuples(CAUSES, st.integers(1, 3)), max_size=30))
def test_a_job_that_makes_progress_may_go_on_for_ever(incidents: list[tuple[Cause, int]]) -> None:
    high_water, told = 0, []
    for cause, progress in incidents:
        high_water += progress
        told.append((cause, high_water))
    assert not any(verdicts(*told))


@given(st.integers(0, 6))
def test_max_incidents_is_how_many_are_recovered_from(limit: int) -> None:
    ends = verdicts(*((DEATH, step) for step in range(10)), max_incidents=limit)
    assert ends.index(True) == limit


def test_after_a_fallback_progress_counts_from_what_storage_brought_back() -> None:
    history, _ = History().after(DEATH, 1000)
    history = history.fell_back(1000, 500)
    for step in range(501, 520):
        history, verdict = history.after(DEATH, step)
        assert verdict is None


def test_falling_back_again_and_again_without_coming_further_ends_the_job() -> None:
    history, verdicts = History(), []
    for _ in range(NO_PROGRESS_LIMIT + 1):
        history, verdict = history.after(DEATH, 7)
        verdicts.append(verdict)
        history = history.fell_back(7, 5)
    assert verdicts[:-1] == [None] * NO_PROGRESS_LIMIT
    assert verdicts[-1] is not None
    assert "fell back to storage 5 times and never came further than step 7" in verdicts[-1].reason


def test_nobody_is_asked_while_all_make_progress() -> None:
    assert stalled({}, {}) == ()
    assert stalled({0: 9.9, 1: 0.0}, dict.fromkeys(range(2), 10.0)) == ()
    assert stalled({0: 9.5, 1: 10.1, 2: 3.0}, dict.fromkeys(range(3), 10.0)) == (0, 1)


def test_who_does_not_answer_or_is_not_in_a_collective_hangs() -> None:
    inquiry = Inquiry(1, 100.0, {0: 5, 1: 5, 2: 5}, {0: True, 1: False})
    ages_s = dict.fromkeys((0, 1, 2), 10.0)
    assert not inquiry.is_over(100.0)
    assert inquiry.is_over(100.01 + ANSWER_TIMEOUT_S)
    verdict = judge(inquiry, {0: 5, 1: 5, 2: 5}, ages_s, 10)
    assert verdict.culprits == (1, 2)
    assert not verdict.everybody_waits


def test_who_moved_on_meanwhile_is_left_alone() -> None:
    inquiry = Inquiry(1, 0.0, {0: 5, 1: 5}, {0: True})
    assert judge(inquiry, {0: 6, 1: 6}, {0: 0.0, 1: 0.0}, 10).culprits == ()


def test_all_in_a_collective_is_an_incident_without_culprit() -> None:
    inquiry = Inquiry(1, 0.0, {0: 5, 1: 5}, {0: True, 1: True})
    beats = {0: 5, 1: 5}
    assert judge(inquiry, beats, {0: 10.0, 1: 10.0}, 10).everybody_waits
    assert not judge(inquiry, {**beats, 2: 9}, {0: 10.0, 1: 10.0, 2: 1.0}, 10).everybody_waits
    assert judge(inquiry, {**beats, 2: 9}, {0: 20.0, 1: 20.0, 2: 1.0}, 10).everybody_waits


@pytest.mark.parametrize(
    ("longest_s", "limit_s"), [(0.0, 600.0), (0.2, 30.0), (3.0, 30.0), (20.0, 200.0), (90.0, 600.0)]
)
def test_the_limit_follows_the_steps(longest_s: float, limit_s: float) -> None:
    assert Heartbeat.of(None).within_step_s(longest_s) == limit_s
    assert Heartbeat.of(5.0).within_step_s(longest_s) == 5.0


class Watched:
    """Three ranks on one node, of which the last two wait for the first."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.watch = HangWatch(Heartbeat.of(None), lambda inquiry, ranks: self.asked.append(ranks))

    def silent(self, *ranks: tuple[int, float, int], longest_s: float = 2.0) -> None:
        rows = [[rank, 7, int(age_s * 1000), 12, in_step] for rank, age_s, in_step in ranks]
        self.watch.hear(0, rows, longest_s, 1000.0)

    def look(self, later_s: float = 0.0) -> list[Hang]:
        return self.watch.look(range(3), 1000.0 + later_s)


def test_a_rank_that_is_silent_in_a_step_is_found_at_the_limit_of_steps() -> None:
    watched = Watched()
    watched.silent((0, 29.0, 1), (1, 28.5, 1), (2, 28.5, 1))
    assert (watched.look(), watched.asked) == ([], [])
    watched.silent((0, 30.1, 1), (1, 29.6, 1), (2, 29.6, 1))
    assert (watched.look(), watched.asked) == ([], [[0, 1, 2]])
    for rank in (1, 2):
        watched.watch.answered(1, rank, True, "in a collective")
    assert watched.look(0.5) == []
    assert watched.look(1.0) == [Hang(0, 30.0, 12, "no answer")]


def test_a_rank_that_writes_a_checkpoint_has_its_time_and_so_have_those_that_wait_for_it() -> None:
    watched = Watched()
    watched.silent((0, 100.0, 0), (1, 99.0, 1), (2, 99.0, 1))
    assert (watched.look(), watched.asked) == ([], [[1, 2]])
    for rank in (1, 2):
        watched.watch.answered(1, rank, True, "in a collective")
    assert watched.look(0.5) == []


def test_until_every_node_knows_how_long_a_step_takes_the_ceiling_holds() -> None:
    watched = Watched()
    watched.silent((0, 599.0, 1), longest_s=0.0)
    assert (watched.look(), watched.asked) == ([], [])
    watched.silent((0, 600.5, 1), longest_s=0.0)
    assert (watched.look(), watched.asked) == ([], [[0]])
