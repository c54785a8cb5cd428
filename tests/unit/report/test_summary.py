"""Test the summary of a run: what is known of it, what is not, and how that is said in JSON."""

import json

import pytest
from hypothesis import given

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import RunState, build_report
from checkpointless.observability.telemetry.events import Event
from tests.drawn import examples
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import LOGS, as_json, html_page, report_of, simple_run


def test_what_no_event_says_is_unknown() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, resumed=15)
    report = report_of(run)
    assert report.steps_lost == 6
    assert report.run.state is RunState.OPEN
    plain = MadeUpRun()  # its block is no training loop that we know
    plain.add(0, "job", "begin")
    plain.add(2, "go", "point", high_water=-1)
    plain.add(5, "detect", "point", incident="1", cause="x", culprit=0, how="exit")
    plain.generation = 1
    plain.add(6, "go", "point", incident="1", high_water=-1)
    plain.add(9, "job", "end", code=0, reason=[])
    report = report_of(plain)
    assert report.incidents[0].outcome is Outcome.RESUMED
    assert (report.steps_lost, report.run.step_s) == (None, None)
    assert report.goodput is not None
    assert (report.goodput.seconds["startup"], report.goodput.incidents_s, report.goodput.ettr) == (2.0, 1.0, None)


@examples(50)
@given(LOGS)
def test_any_log_has_a_report(events: list[Event]) -> None:
    document = json.loads(as_json(build_report("x", events)))
    assert document["format"] == 2
    goodput = document["goodput"]
    assert (goodput is None) == (not events)
    assert goodput is None or goodput["ettr"] is None or 0 <= goodput["ettr"] <= 1


def test_json_says_what_the_report_says() -> None:
    run, _ = simple_run()
    report = report_of(run, caused={"sigkill@optimizer:rank=1,step=22": 1}, lines_left_out=2)
    document = json.loads(as_json(report))
    assert document["run"]["state"] == "succeeded"
    assert document["run"]["begin"] == "2023-11-14T22:13:20.000Z"
    assert document["run"]["lines_left_out"] == 2
    (incident,) = document["incidents"]
    assert incident["kind"] == "sigkill"
    assert (incident["rung"], incident["outcome"], incident["steps_lost"]) == ("in-process", "resumed", 0)
    assert (incident["nbytes"], incident["sources"]) == (1_500_000, [0])
    assert sum(incident["tiles_s"].values()) == pytest.approx(incident["headline_s"])
    assert document["outcomes"] == {"resumed": 1, "resumed, not exact": 0, "escalated": 0, "failed": 0}
    periods = document["time"]["periods"]
    assert sum(period["seconds"] for period in periods) == document["goodput"]["wall_s"] == 100.0


def test_failed_device_checks_and_saves_are_shown_everywhere_and_in_order() -> None:
    run = MadeUpRun()
    run.start()
    assert not any(title in html_page(report_of(run), {}) for title in ("device checks", "not saved"))
    for at_s, remedy in ((31.1, "try"), (35.1, "give_up")):
        why = "the device check exited with 1: <b>"
        run.add(at_s, "bad_device", "point", rank=1, node_number=0, why=why, remedy=remedy)
    run.add(31.0, "save_failed", "point", rank=0, path="/ckpt/step=5", reason="no mount", ranks=[0, 1])
    run.add(20.0, "save_failed", "point", rank=1, path="/ckpt/step=3", reason="disk <full>", ranks=[1])
    report = report_of(run)
    found = json.loads(as_json(report))
    assert [(each["node"], each["rank"], each["remedy"]) for each in found["devices"]] == [
        ("0", 1, "try"),
        ("0", 1, "give_up"),
    ]
    assert found["failed_saves"] == [
        {"path": "/ckpt/step=3", "reason": "disk <full>", "ranks": [1]},
        {"path": "/ckpt/step=5", "reason": "no mount", "ranks": [0, 1]},
    ]
    page = html_page(report, {})
    for shown in ("the device check exited with 1: &lt;b&gt;", "give_up", "disk &lt;full&gt;", "/ckpt/step=5"):
        assert shown in page
