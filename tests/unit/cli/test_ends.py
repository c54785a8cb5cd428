"""Test what the command line says at the end of a run: of faults that did not happen, and of Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointless.agent import launch as launch_module
from checkpointless.cli import main


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
