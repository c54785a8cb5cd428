"""Test what the demo writes down of its drawn cases."""

from __future__ import annotations

import json
from pathlib import Path

from checkpointless.faults.chaos import LAYOUTS, draw
from checkpointless.testing.chaos import _Result, _write


def test_the_file_says_ranks_parallel_sizes_and_holders_of_each_case(tmp_path: Path) -> None:
    cases = [draw(0, number) for number in range(60)]
    _write([_Result(case, case.outcome) for case in cases], tmp_path / "results.json")
    entries = json.loads((tmp_path / "results.json").read_text())
    layouts = [entry["layout"] for entry in entries]
    assert {"nproc": 4, "sizes": {"tp": 2}, "holders": 2} in layouts
    assert {"nproc": 6, "sizes": {}, "holders": 3} in layouts
    assert {"nproc": 8, "sizes": {"tp": 2, "pp": 2}, "holders": 2} in layouts
    assert len({json.dumps(layout) for layout in layouts}) == len(LAYOUTS)
    assert [entry["outcome"] for entry in entries] == [case.outcome.value for case in cases]
