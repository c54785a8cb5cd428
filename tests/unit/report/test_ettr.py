"""Test what the time of a run was spent on: every second is accounted for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.summary import _Milestones, _periods
from tests.unit.made_up_run import UTC, MadeUpRun, S
from tests.unit.report.reports import report_of, simple_run


def test_every_second_is_accounted_for() -> None:
    run, done_s = simple_run()
    report = report_of(run)
    assert report.goodput is not None
    assert dict(report.goodput.seconds) == pytest.approx(
        {"training": 100 - 10 - 1 - (done_s - 31), "startup": 10.0, "shutdown": 1.0, "SIGKILL": done_s - 31}
    )
    assert report.goodput.wall_s == 100.0
    assert report.goodput.incidents_s == pytest.approx(done_s - 31)
    assert report.goodput.ettr == pytest.approx((100 - 10 - 1 - (done_s - 31)) / 100)
    assert report.goodput.ettr_while_training == pytest.approx(1 - (done_s - 31) / 89)
    causes = [period.cause for period in report.periods]
    assert causes == ["startup", "training", "SIGKILL", "training", "shutdown"]


def test_steps_lost_and_the_time_to_make_them_again() -> None:
    run = MadeUpRun()
    run.start(at_s=10)
    run.incident(31.0, "1", committed=21, resumed=15)
    run.end(100.0, step=80)
    report = report_of(run)
    assert report.steps_lost == 6
    assert report.run.step_s == pytest.approx((20 + 99 - 32.3) / (20 + 64), rel=0.02)
    assert report.goodput is not None
    assert report.goodput.seconds["repeated"] == pytest.approx(6 * (report.run.step_s or 0))
    unhurt, _ = simple_run()
    assert report_of(unhurt).steps_lost == 0


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=8),
    st.floats(0, 120),
    st.floats(0, 100) | st.none(),
    st.floats(0, 120) | st.none(),
)
def test_periods_tile_the_run_whatever_comes(
    incidents: list[tuple[float, float]], wall_s: float, trains_s: float | None, trained_s: float | None
) -> None:
    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else UTC + round(seconds * S)

    summaries = [
        IncidentSummary(str(n), n, "", None, "", UTC + round(at * S), UTC + round((at + took) * S), took)
        for n, (at, took) in enumerate(sorted(incidents))
    ]
    marks = _Milestones(UTC, UTC + round(wall_s * S), ns(trains_s), ns(trained_s))
    periods = _periods(marks, summaries)
    edges = [edge for period in periods for edge in (period.begin_ns, period.end_ns)]
    assert edges[1:-1:2] == edges[2::2]
    assert sum(period.seconds for period in periods) == pytest.approx(round(wall_s * S) / S)
    assert all(period.seconds > 0 for period in periods)
