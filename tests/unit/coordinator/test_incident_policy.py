"""Test the policy of incidents: who is to blame, and when it is enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.coordinator.incident_policy import NO_PROGRESS_LIMIT, History
from checkpointless.launcher.protocol.causes import Cause, CauseKind, attribute, exception_cause, exit_cause

CAUSES = st.builds(
    Cause, st.sampled_from(CauseKind), st.integers(0, 7), st.just("exit"), st.text(max_size=5), st.integers(-1, 9)
)


def bug(step: int = 4, message: str = "no") -> Cause:
    return exception_cause(1, "ValueError", message, "Traceback of a bug\n", step, victim=False)


DEATH = exit_cause(2, -9, 4)
VICTIM = exception_cause(0, "DistBackendError", "Connection closed by peer", "", 4, victim=True)


@given(st.lists(CAUSES, min_size=1))
def test_the_first_of_the_strongest_causes_explains(causes: list[Cause]) -> None:
    found = attribute(causes)
    kinds = list(CauseKind)
    assert all(kinds.index(cause.kind) <= kinds.index(found.kind) for cause in causes)
    assert next(cause for cause in causes if cause.kind == found.kind) == found
    assert found.culprit == (None if found.kind is CauseKind.VICTIM else found.rank)


def decisions(*incidents: tuple[Cause, int], max_incidents: int | None = None) -> list[bool]:
    """Return whether each incident, given with the high water at its time, ends the job."""
    history, ends = History(max_incidents), []
    for cause, high_water in incidents:
        history, give_up = history.after(cause, high_water)
        ends.append(give_up is not None)
    return ends


@pytest.mark.parametrize(
    ("incidents", "is_the_end"),
    [
        ([(bug(), 3), (bug(), 3), (bug(), 3)], True),
        ([(bug(), 3), (bug(), 3), (DEATH, 3), (bug(), 3)], True),  # what comes in between does not reset the count
        ([(bug(), 3), (bug(), 3), (bug(), 4), (bug(), 4)], False),
        ([(bug(), 3), (bug(5), 3), (bug(message="other"), 3)], False),
    ],
)
def test_a_third_equal_error_without_progress_ends_it(incidents: list[tuple[Cause, int]], is_the_end: bool) -> None:
    assert decisions(*incidents) == [False] * (len(incidents) - 1) + [is_the_end]


@given(st.lists(st.sampled_from([DEATH, VICTIM]), min_size=12, max_size=12))
def test_incidents_without_progress_end_the_job(causes: list[Cause]) -> None:
    ends = decisions(*((cause, 3) for cause in causes))
    assert ends.index(True) == NO_PROGRESS_LIMIT - 1


@given(st.lists(st.tuples(CAUSES, st.integers(1, 3)), max_size=30))
def test_a_job_that_makes_progress_may_go_on_for_ever(incidents: list[tuple[Cause, int]]) -> None:
    high_water, told = 0, []
    for cause, progress in incidents:
        high_water += progress
        told.append((cause, high_water))
    assert not any(decisions(*told))


@given(st.integers(0, 6))
def test_max_incidents_is_how_many_are_recovered_from(limit: int) -> None:
    ends = decisions(*((DEATH, step) for step in range(10)), max_incidents=limit)
    assert ends.index(True) == limit


def test_after_a_fallback_progress_counts_from_what_storage_brought_back() -> None:
    history, _ = History().after(DEATH, 1000)
    history = history.fell_back(1000, 500)
    for step in range(501, 520):
        history, give_up = history.after(DEATH, step)
        assert give_up is None


def test_falling_back_again_and_again_without_coming_further_ends_the_job() -> None:
    history, decisions = History(), []
    for _ in range(NO_PROGRESS_LIMIT + 1):
        history, give_up = history.after(DEATH, 7)
        decisions.append(give_up)
        history = history.fell_back(7, 5)
    assert decisions[:-1] == [None] * NO_PROGRESS_LIMIT
    assert decisions[-1] is not None
    assert "fell back to storage 5 times and never came further than step 7" in decisions[-1].reason
