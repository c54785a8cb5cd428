"""Test ``checkpointless run --dry-run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.cli import main

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(EXAMPLES / "train_ddp.py")
    assert main(["run", "--nproc-per-node", "4", "--dry-run", script, "--steps", "5"]) == 0
    assert capsys.readouterr().out == f"would start 4 ranks of {script} on this node\n"
