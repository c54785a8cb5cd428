"""Test what the command line says at the end of runs: of faults that did not happen, of Ctrl-C, of equality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointless.cli import main
from checkpointless.launcher.agent import launch as launch_module
from checkpointless.observability.telemetry.steps import StepLog


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("phase", "explains"), [("data", True), ("between", False)])
def test_a_loop_of_ones_own_is_told_how_it_announces_a_phase(
    phase: str, explains: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_module, "launch", lambda *_: 0)
    fault = f"exit@{phase}:rank=0,step=2"
    assert main(["run", "--fault", fault, "train.py"]) == 1
    said = capsys.readouterr().err
    assert f"faults will be injected: {fault}" in said
    assert f"{fault} did not happen" in said
    assert (f"caller.enter_phase('{phase}', step)" in said) == explains


def test_ctrl_c_outside_of_a_job_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_module, "launch", interrupted)  # before it listens to signals itself
    assert main(["run", "train.py"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "checkpointless: stopped by Ctrl-C"


def record_run(run_dir: Path, losses: list[float]) -> None:
    log = StepLog(run_dir, 0)
    for step, loss in enumerate(losses, start=1):
        log.record(step, loss, f"digest {loss}")


def test_verify_says_whether_two_runs_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, losses in {"a": [2.0, 1.0], "b": [2.0, 1.0], "c": [2.0, 1.0 + 2**-52]}.items():
        record_run(tmp_path / name, losses)
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "equal: 2 steps on 1 ranks" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "c")]) == 1
    assert "not equal: loss of step 2 on rank 0 differs, by 2.22e-16" in capsys.readouterr().out
