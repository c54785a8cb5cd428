"""Test what a report says of devices, on the terminal, in JSON and on the page."""

import json

from checkpointless.cli.tables import device_table
from checkpointless.report.devices import DeviceTrouble, device_troubles
from checkpointless.report.page import render
from checkpointless.report.summary import as_json
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import report_of


def run_with_a_bad_device() -> MadeUpRun:
    run = MadeUpRun()
    run.start()
    run.add(20.0, "device", "point", device="GPU 1", kind="pcie", what="8 of 16 lanes", is_fatal=False)
    run.add(31.0, "device", "point", rank=1, device="GPU 0 <b>", kind="xid", what="Xid 79", is_fatal=True)
    run.add(31.1, "bad_device", "point", rank=1, device="GPU 0 <b>", node_number=0, why="Xid 79", remedy="try")
    run.add(35.1, "bad_device", "point", rank=1, device="GPU 0 <b>", node_number=0, why="Xid 79", remedy="give_up")
    return run


def test_every_problem_is_told_with_what_was_done() -> None:
    events = run_with_a_bad_device().events
    assert device_troubles(events) == (
        DeviceTrouble(0, "GPU 1", "8 of 16 lanes", False),
        DeviceTrouble(0, "GPU 0 <b>", "Xid 79", True, ("try", "give_up")),
    )
    assert device_troubles([]) == ()


def test_the_report_shows_them_everywhere() -> None:
    run = run_with_a_bad_device()
    report = report_of(run)
    assert [each["what"] for each in json.loads(as_json(report))["devices"]] == ["8 of 16 lanes", "Xid 79"]
    assert device_table(report).row_count == 2
    page = render(report, run.events)
    assert "GPU 0 &lt;b&gt;: Xid 79" in page
    assert "(try, give_up)" in page
    plain = MadeUpRun()
    plain.start()
    assert "wrong with devices" not in render(report_of(plain), plain.events)
