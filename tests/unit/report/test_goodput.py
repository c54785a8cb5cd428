"""Test what the wall time of a job went to: the parts add up, whatever the events are."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.observability.report.goodput import Goodput
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.summary import Job, _Milestones, _periods, build_report
from checkpointless.observability.telemetry.events import Event
from tests.drawn import examples
from tests.unit.made_up_run import UTC, MadeUpRun, S
from tests.unit.report.reports import LOGS, report_of, simple_run


def goodput_of(run: MadeUpRun) -> Goodput:
    found = report_of(run).goodput
    assert found is not None
    check(found)
    return found


def check(found: Goodput) -> None:
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)
    assert all(spent_s > 0 for spent_s in found.seconds.values())
    for ratio in (found.ratio, found.ettr, found.ettr_while_training):
        assert ratio is None or 0 <= ratio <= 1
    for each in found.lost:
        assert each.seconds <= found.seconds.get(each.cause, 0.0) + 1e-6


def test_each_incident_is_a_cause_of_its_own() -> None:
    run = MadeUpRun(ranks=4, per_node=2)
    run.start()
    took_s = {}
    for number, how in enumerate(("exception", "SIGKILL", "hang", "node", "planned", "exception")):
        at_s = 30.0 * (number + 1)
        if number == 5:
            run.add(at_s, "corrupted", "point", 3, step=30, parameter="w", parameters=1, redone=True)
        who = {"culprit": None} if how in ("node", "planned") else {"culprit": 3}
        cause = "corrupted" if number == 5 else how
        took_s[cause] = run.incident(at_s, str(number), committed=10 + number, how=how, **who) - at_s - 0.1
        if how in ("node", "planned"):
            (detect,) = [each for each in run.events if each.incident == str(number) and each.stage == "detect"]
            run.events[run.events.index(detect)] = replace(detect, fields={**detect.fields, "who": "node 1"})
    run.end(300.0, step=200)
    found = goodput_of(run)
    assert {cause: found.seconds[cause] for cause in took_s} == pytest.approx(took_s)
    assert list(found.seconds)[:3] == ["training", "startup", "shutdown"]
    lost = {each.cause: (each.who, each.rank, each.node) for each in found.lost}
    assert (lost["node"], lost["hang"]) == (("node 1", None, None), ("", 3, 1))


def test_a_save_and_a_slow_rank_take_their_parts_of_training() -> None:
    run, _ = simple_run()
    before = goodput_of(run)
    slow = {"own_s": 0.9, "usual_s": 0.4, "on_node": 1, "why": "compute"}
    run.add(50.0, "straggler", "begin", 1, step=40, **slow)
    run.add(70.0, "straggler", "end", 1, step=60)
    run.add(60.0, "saved", "point", 0, seconds=2.0)
    run.add(32.0, "saved", "point", 0, seconds=1.0)  # in the incident, whose time it is
    found = goodput_of(run)
    assert found.seconds["saves"] == pytest.approx(2.0, abs=0.1)
    assert found.seconds["stragglers"] == pytest.approx(18 * 0.5), "20 steps of 0.5 s each, less those of the save"
    assert found.ettr == pytest.approx(before.ettr)
    assert before.ratio is not None
    assert found.ratio == pytest.approx(before.ratio - 0.11, abs=0.001)
    (slow_rank,) = [each for each in found.lost if each.cause == "stragglers"]
    assert (slow_rank.rank, slow_rank.node) == (1, 1)


def test_the_start_of_the_first_command_counts() -> None:
    run, _ = simple_run()
    for at_s, before_s in ((0.5, 5.5), (0.6, 3600.0)):  # the second node's agent had waited for the job
        run.add(at_s, "job", "begin", nproc=2, before_s=before_s)
    run.events.remove(run.events[0])
    found = goodput_of(run)
    assert (found.wall_s, found.seconds["startup"]) == (105.0, 15.0)


@examples(200)
@given(LOGS)
def test_the_parts_add_up_whatever_the_events_are(events: Sequence[Event]) -> None:
    report = build_report("x", events)
    assert (report.goodput is None) == (not events)
    if report.goodput is None:
        return
    check(report.goodput)
    assert report.goodput.wall_s == pytest.approx(sum(period.seconds for period in report.periods))


@examples(100)
@given(st.lists(LOGS, min_size=1, max_size=4))
def test_the_parts_of_a_job_add_up_whatever_its_runs_are(logs: Sequence[Sequence[Event]]) -> None:
    runs = [[replace(each, ts=each.ts + number * 10**7) for each in log] for number, log in enumerate(logs)]
    job = Job.of(build_report(str(number), log) for number, log in enumerate(runs))
    if job.goodput is not None:
        check(job.goodput)
        first, last = (edge([e.ts for log in runs for e in log]) for edge in (min, max))
        assert job.goodput.wall_s <= (last - first) / 1e9 + 1e-9


def test_a_later_run_makes_the_steps_again_that_an_earlier_one_had_made() -> None:
    first = Goodput(0, 10**10, {"training": 10.0}, first_step=1, last_step=10, step_s=1.0)
    second = Goodput(2 * 10**10, 3 * 10**10, {"training": 10.0}, first_step=7, last_step=16, step_s=1.0)
    job = Goodput.of_job([second, first])
    assert (job.seconds, job.ratio) == ({"training": 16.0, "repeated": 4.0, "idle": 10.0}, pytest.approx(16 / 30))
    assert Goodput.of_job([first, replace(second, step_s=None)]).ratio is None
    with pytest.raises(ValueError, match="overlap"):
        Goodput.of_job([first, replace(second, begin_ns=5)])


# --- the periods of a run -----------------------------------------------------------------------------------------


def test_every_second_is_accounted_for() -> None:
    run, done_s = simple_run()
    found, lost_s = goodput_of(run), done_s - 31
    parts = {"training": 89 - lost_s, "startup": 10.0, "shutdown": 1.0, "SIGKILL": lost_s}
    assert (dict(found.seconds), found.incidents_s) == (pytest.approx(parts), pytest.approx(lost_s))
    assert (found.wall_s, found.ettr) == (100.0, pytest.approx((89 - lost_s) / 100))
    assert found.ettr_while_training == pytest.approx(1 - lost_s / 89)
    causes = [period.cause for period in report_of(run).periods]
    assert causes == ["startup", "training", "SIGKILL", "training", "shutdown"]


def test_steps_lost_and_the_time_to_make_them_again() -> None:
    run = MadeUpRun()
    run.start(at_s=10)
    run.incident(31.0, "1", committed=21, resumed=15)
    run.end(100.0, step=80)
    report = report_of(run)
    assert (report.steps_lost, report.run.step_s) == (6, pytest.approx((20 + 99 - 32.3) / (20 + 64), rel=0.02))
    assert goodput_of(run).seconds["repeated"] == pytest.approx(6 * (report.run.step_s or 0))
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
