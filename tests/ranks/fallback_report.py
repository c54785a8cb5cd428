"""Check the report of a job that lost a step: all holders of a shard died, and storage gave back an older one."""

from __future__ import annotations

import json

import pytest

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import RunState, build_report
from checkpointless.observability.report.trace import write_trace
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.jobs import Job
from tests.unit.report.reports import html_page
from tests.unit.report.test_forms import check_page, check_trace


def check(job: Job) -> None:
    """Check that the report is right about a job of 7 steps that went back from step 4 to step 3."""
    events = read_events(job.run_dir)
    report = build_report("runs/1", events)

    first, second = report.incidents
    assert (first.outcome, second.outcome, second.rung) == (Outcome.ESCALATED, Outcome.RESUMED, Rung.JOB)
    assert (second.committed, second.resumed_after) == (4, 3)
    assert report.steps_lost == 1
    assert report.kinds == {"sigkill": 2}
    assert (report.run.state, report.run.last_step, report.run.nproc) == (RunState.SUCCEEDED, 7, 4)
    assert sum(second.tiles_s.values()) == pytest.approx(second.headline_s, abs=0.002)

    goodput = report.goodput
    assert goodput is not None
    assert goodput.seconds["repeated"] == pytest.approx(report.run.step_s)
    assert goodput.ettr is not None
    assert 0 < goodput.ettr < 1
    assert min(goodput.seconds["startup"], goodput.incidents_s, goodput.seconds["shutdown"]) > 0

    check_trace(json.loads(write_trace(report, events)))
    check_page(html_page(report, {}))
