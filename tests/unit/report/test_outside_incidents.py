"""Test what a report says of failed device checks and saves: on the terminal, in JSON and on the page."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from rich.table import Table

from checkpointless.cli.tables import _device_table, _failed_save_table
from checkpointless.observability.report.summary import Report
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import as_json, html_page, report_of


def made_up_run() -> MadeUpRun:
    """Make up a run with two failed checks of devices, and two failed saves, of which the later comes first."""
    run = MadeUpRun()
    run.start()
    for at_s, remedy in ((31.1, "try"), (35.1, "give_up")):
        why = "the device check exited with 1: <b>"
        run.add(at_s, "bad_device", "point", rank=1, node_number=0, why=why, remedy=remedy)
    run.add(31.0, "save_failed", "point", rank=0, path="/ckpt/step=5", reason="no mount", ranks=[0, 1])
    run.add(20.0, "save_failed", "point", rank=1, path="/ckpt/step=3", reason="disk <full>", ranks=[1])
    return run


@pytest.mark.parametrize(
    ("what", "rows", "table", "shown", "title"),
    [
        (
            "devices",
            [{"node": "0", "rank": 1, "remedy": "try"}, {"node": "0", "rank": 1, "remedy": "give_up"}],
            _device_table,
            "the device check exited with 1: &lt;b&gt;",
            "device checks",
        ),
        (
            "failed_saves",
            [
                {"path": "/ckpt/step=3", "reason": "disk <full>", "ranks": [1]},
                {"path": "/ckpt/step=5", "reason": "no mount", "ranks": [0, 1]},
            ],
            _failed_save_table,
            "disk &lt;full&gt;",
            "not saved",
        ),
    ],
)
def test_the_report_shows_them_everywhere_and_in_order(
    what: str, rows: list[dict[str, object]], table: Callable[[Report], Table], shown: str, title: str
) -> None:
    report = report_of(made_up_run())
    found = json.loads(as_json(report))[what]
    assert [{key: each[key] for key in row} for each, row in zip(found, rows, strict=True)] == rows
    assert table(report).row_count == 2
    assert shown in html_page(report, {})
    plain = MadeUpRun()
    plain.start()
    assert title not in html_page(report_of(plain), {})
