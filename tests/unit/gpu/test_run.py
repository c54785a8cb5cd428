"""Test how the GPU suite is run: what is chosen, its bounds, and what it leaves behind when a part hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import isolated, results
from tests.gpu.isolated import IsolatedError
from tests.gpu.run import LIMIT_S, PARTS, ROOT, Part, chosen, command, environment, run, run_part
from tests.unit.gpu import bodies

HERE = f"{bodies.__name__}:"


def test_all_parts_end_within_the_limit_of_the_suite_and_name_all_tests() -> None:
    assert sum(part.limit_s for part in chosen("")) <= LIMIT_S == 11 * 60
    named = {path for part in PARTS for path in part.paths}
    assert named == {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert all((ROOT / path).is_file() for part in PARTS for path in part.on_cpu)


def test_parts_are_chosen_by_name() -> None:
    assert [part.name for part in chosen("")] == ["part2", "part3", "part1", "part4"]
    assert [part.name for part in chosen("part5,part2")] == ["part2", "part5"]
    with pytest.raises(ValueError, match="there is no part6: the parts are part2, part3, part1, part4, part5"):
        chosen("part6")


def test_without_cuda_a_part_runs_what_it_has_for_a_cpu(tmp_path: Path) -> None:
    part2, _, _, part4, _ = PARTS
    assert "tests/gpu/test_jobs.py" in command(part2, tmp_path, has_cuda=True)
    assert "tests/gpu/test_jobs.py" in command(part2, tmp_path, has_cuda=False)
    assert "benchmarks.gpu.run" in command(part4, tmp_path, has_cuda=False)


def test_the_kit_comes_before_this_tree() -> None:
    path = environment(Path("/a/site"))["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == ["/a/site", str(ROOT)]
    assert environment(None)["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


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


def test_what_is_cut_off_is_a_failure_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import run as suite

    part = Part("part1", "a part", 60.0)
    monkeypatch.setattr(suite, "run_part", lambda words, env, log, limit_s: log.write_text("so far") and None)
    run([part], tmp_path, {}, has_cuda=True, limit_s=100.0)
    run([Part("part2", "another", 60.0)], tmp_path, {}, has_cuda=True, limit_s=0.0)
    first, second = results.read(tmp_path)
    assert first.outcome is second.outcome is results.Outcome.CUT
    assert first.detail == "it was cut off after 60 s\nso far"
    assert second.detail == "the time of the whole suite was over before it began"


def test_a_part_that_crashes_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import run as suite

    monkeypatch.setattr(suite, "run_part", lambda words, env, log, limit_s: log.write_text("no pytest") - 8)
    run([Part("part1", "a part", 60.0)], tmp_path, {}, has_cuda=True, limit_s=100.0)
    assert results.has_failed(results.read(tmp_path))


# ---- functions in processes of their own


@pytest.mark.slow
def test_a_function_runs_in_each_rank() -> None:
    assert isolated.run_ranks(f"{HERE}rank", 2, 60.0, add=10) == [[0, 2, 10], [1, 2, 11]]


@pytest.mark.slow
def test_a_function_that_hangs_is_ended_with_its_stacks() -> None:
    began_s = time.monotonic()
    with pytest.raises(IsolatedError) as caught:
        isolated.run(f"{HERE}hang", 4.0)
    assert time.monotonic() - began_s < 40.0
    assert "Timeout" in str(caught.value)
    assert "in hang" in str(caught.value)


@pytest.mark.slow
def test_a_function_that_raises_or_dies_fails_with_its_log() -> None:
    with pytest.raises(IsolatedError, match="ValueError: it failed"):
        isolated.run(f"{HERE}fail", 60.0)
    (ended,) = isolated.end(f"{HERE}die", 60.0)
    assert (ended.code, ended.result, ended.log) == (75, None, "last words\n")


# ---- the collection
