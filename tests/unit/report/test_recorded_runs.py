"""Test that runs recorded by an older commit are read as they were then.

Commit a084c7d, examples/train_ddp.py, 6 steps on 2 ranks: without a fault, and with an exception and a SIGKILL.
"""

import json
from pathlib import Path

import pytest

import tests
from checkpointless.cli.command_line import main

RUNS = Path(tests.__file__).parent / "recorded_runs"


def test_verify_compares_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(RUNS / "calm"), str(RUNS / "rough")]) == 0
    assert "equal: 6 steps on 2 ranks, bit by bit" in capsys.readouterr().out


def test_report_reads_incidents_levels_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RUNS / "rough"), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [
        (each["how"], each["rung"], each["resumed_after"], each["sources"], each["outcome"])
        for each in report["incidents"]
    ] == [("exception", "in-process", 1, [], "resumed"), ("SIGKILL", "process", 4, [1], "resumed")]
    assert [round(each["headline_s"], 2) for each in report["incidents"]] == [0.23, 0.71]
    assert all(sum(each["tiles_s"].values()) == pytest.approx(each["headline_s"]) for each in report["incidents"])
