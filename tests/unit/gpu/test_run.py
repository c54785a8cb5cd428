"""Test how the GPU suite is run: what is chosen, its bounds, and what it leaves behind when a part hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import isolated
from tests.gpu.isolated import IsolatedError
from tests.gpu.run import LIMIT_S, PARTS, ROOT, chosen, run_part
from tests.unit.gpu import bodies

HERE = f"{bodies.__name__}:"


def test_all_parts_end_within_the_limit_of_the_suite_and_name_all_tests() -> None:
    assert sum(part.limit_s for part in chosen("")) <= LIMIT_S == 11 * 60
    named = {path for part in PARTS for path in part.paths}
    assert named == {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert all((ROOT / path).is_file() for part in PARTS for path in part.on_cpu)


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '77'], start_new_session=True); print('on')"
    began_s = time.monotonic()
    log = tmp_path / "log"
    words = [sys.executable, "-c", f"{script}; sys.stdout.flush(); time.sleep(60)"]
    assert run_part(words, dict(os.environ), log, 5.0) is None
    assert time.monotonic() - began_s < 40.0
    assert log.read_text() == "on\n"
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "sleep 77" not in left


# ---- functions in processes of their own


@pytest.mark.slow
def test_a_function_runs_in_each_rank() -> None:
    assert isolated.run_ranks(f"{HERE}rank", 2, 60.0, add=10) == [[0, 2, 10], [1, 2, 11]]


@pytest.mark.slow
def test_a_function_that_raises_or_dies_fails_with_its_log() -> None:
    with pytest.raises(IsolatedError, match="ValueError: it failed"):
        isolated.run(f"{HERE}fail", 60.0)
    (ended,) = isolated.end(f"{HERE}die", 60.0)
    assert (ended.code, ended.result, ended.log) == (75, None, "last words\n")


# ---- the collection
