"""The benchmark of the control plane speaks to the coordinator as nodes do, and so has to follow it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_case_comes_to_what_it_must_come_to(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    run = ROOT / "benchmarks" / "control_plane" / "run.py"
    command = [sys.executable, str(run), "--ranks", "64", "--repeats", "1", "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(results.read_text())["runs"]) == 8
