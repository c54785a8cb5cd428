"""Test what a report says of failed device checks, on the terminal, in JSON and on the page."""

import json

from checkpointless.cli.tables import _device_table, html_page
from checkpointless.observability.report.summary import _bad_devices, _BadDevice, as_json
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import report_of

WHY = "the device check exited with 1: <b>"


def run_with_a_bad_device() -> MadeUpRun:
    run = MadeUpRun()
    run.start()
    for at_s, remedy in ((31.1, "try"), (35.1, "give_up")):
        run.add(at_s, "bad_device", "point", rank=1, node_number=0, why=WHY, remedy=remedy)
    return run


def test_every_failed_check_is_told_with_what_was_done() -> None:
    events = run_with_a_bad_device().events
    assert _bad_devices(events) == (_BadDevice("0", 1, WHY, "try"), _BadDevice("0", 1, WHY, "give_up"))
    assert _bad_devices([]) == ()


def test_the_report_shows_them_everywhere() -> None:
    run = run_with_a_bad_device()
    report = report_of(run)
    assert [each["remedy"] for each in json.loads(as_json(report))["devices"]] == ["try", "give_up"]
    assert _device_table(report).row_count == 2
    assert "the device check exited with 1: &lt;b&gt;" in html_page(report, {})
    plain = MadeUpRun()
    plain.start()
    assert "device checks" not in html_page(report_of(plain), {})
