"""Test what a report says of checkpoints that could not be saved, on the terminal, in JSON and on the page."""

import json

from checkpointless.cli.tables import _failed_save_table, html_page
from checkpointless.observability.report.summary import _failed_saves, _FailedSave, as_json
from checkpointless.observability.telemetry.narration import _failed_save_line
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import report_of


def run_with_failed_saves() -> MadeUpRun:
    run = MadeUpRun()
    run.start()
    run.add(20.0, "save_failed", "point", rank=1, path="/ckpt/step=3", reason="disk <full>", ranks=[1])
    run.add(31.0, "save_failed", "point", rank=0, path="/ckpt/step=5", reason="no mount", ranks=[0, 1])
    return run


def test_every_one_is_told_in_order() -> None:
    events = run_with_failed_saves().events
    assert _failed_saves(events) == (
        _FailedSave("/ckpt/step=3", "disk <full>", (1,)),
        _FailedSave("/ckpt/step=5", "no mount", (0, 1)),
    )
    assert _failed_saves([]) == ()


def test_the_report_shows_them_everywhere() -> None:
    run = run_with_failed_saves()
    report = report_of(run)
    assert [each["path"] for each in json.loads(as_json(report))["failed_saves"]] == [
        "/ckpt/step=3",
        "/ckpt/step=5",
    ]
    assert _failed_save_table(report).row_count == 2
    assert "disk &lt;full&gt;" in html_page(report, {})
    plain = MadeUpRun()
    plain.start()
    assert "not saved" not in html_page(report_of(plain), {})


def test_the_terminal_tells_of_them() -> None:
    lines = [_failed_save_line(event) for event in run_with_failed_saves().events if event.stage == "save_failed"]
    assert lines == [
        "checkpoint /ckpt/step=3 could not be saved (rank 1: disk <full>); training goes on",
        "checkpoint /ckpt/step=5 could not be saved (ranks 0, 1: no mount); training goes on",
    ]
