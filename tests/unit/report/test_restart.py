"""Test what restarts from a checkpoint would have cost instead."""

import pytest

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import RunState, _Source
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import report_of, simple_run


def test_a_restart_costs_what_the_formula_says() -> None:
    run, done_s = simple_run()
    comparison = report_of(run).comparison
    assert comparison is not None
    (restart,) = comparison.restarts
    assert (restart.detect_s, restart.requeue_s, restart.startup_s, restart.load_s) == (0.1, 0.0, 10.0, 0.0)
    assert restart.redo_s == pytest.approx(21.0)  # it is all that was trained, less than half of 15 minutes
    assert comparison.recovered_s == pytest.approx(done_s - 31)
    assert comparison.factor == pytest.approx(31.1 / (done_s - 31))
    sources = {each.name: each.source for each in comparison.assumptions}
    assert sources["start-up"] is _Source.MEASURED
    assert sources["checkpoint interval"] is _Source.ASSUMED
    given = {"detect": 5.0, "requeue": 60.0, "startup": 300.0, "load": 40.0}
    options = {f"--restart-{name}": seconds for name, seconds in given.items()}
    comparison = report_of(run, given={**options, "--checkpoint-interval": 20.0}).comparison
    assert comparison is not None
    assert comparison.restart_s == pytest.approx(5 + 60 + 300 + 40 + 10)
    assert {each.source for each in comparison.assumptions} == {_Source.GIVEN}
    assert comparison.restarts[0].redo_steps == pytest.approx(10, rel=0.05)
    assert comparison.ettr is not None
    assert comparison.ettr < (report_of(run).spent.ettr or 0)  # type: ignore[union-attr]


def test_a_fault_during_recovery_is_no_restart_of_its_own_and_a_failure_is_not_compared() -> None:
    run = MadeUpRun()
    run.start()
    broken_s = run.incident(31.0, "1", committed=21, until="rebuild")
    run.incident(broken_s, "2", committed=21)
    run.incident(60.0, "3", committed=40, until="decide")
    run.end(61.5, code=1, reason="nobody holds shard 3")
    report = report_of(run)
    assert [incident.outcome for incident in report.incidents] == [
        Outcome.ESCALATED,
        Outcome.RESUMED,
        Outcome.FAILED,
    ]
    assert report.comparison is not None
    (restart,) = report.comparison.restarts
    assert restart.incidents == ("1", "2")
    assert report.comparison.incidents_left_out == 1
    assert (report.run.state, report.run.reason) == (RunState.FAILED, "nobody holds shard 3")


def test_a_fault_during_the_start_leaves_the_start_up_to_the_default() -> None:
    run = MadeUpRun()
    run.add(0, "job", "begin")
    run.incident(5.0, "1", committed=0)
    run.end(50.0, step=30)
    report = report_of(run)
    assert report.spent is not None
    assert report.spent.startup_s == pytest.approx(5.1)
    assert report.comparison is not None
    startup = next(each for each in report.comparison.assumptions if each.name == "start-up")
    assert (startup.seconds, startup.source) == (60.0, _Source.ASSUMED)
