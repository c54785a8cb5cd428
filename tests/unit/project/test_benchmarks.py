"""Benchmarks: where their runs lie, and what they compare with, or that it cannot be had."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.reentry.run import NVRX_TARGET
from benchmarks.trainers.run import TORCHFT_SETTINGS, make_environment
from benchmarks.transfer.run import TORCHFT_TARGET


@pytest.mark.parametrize("error", [RuntimeError("the job failed"), KeyboardInterrupt(), None])
def test_runs_of_a_benchmark_that_fails_are_left_where_its_error_says(
    error: BaseException | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)) if error else nullcontext(), common.folder_of_runs(None, "test-") as folder:
        (folder / "output.log").touch()
        if error is not None:
            raise error
    assert folder.exists() is isinstance(error, RuntimeError)
    assert (str(folder) in capsys.readouterr().out) is isinstance(error, RuntimeError)
    shutil.rmtree(folder, ignore_errors=True)


def test_runs_that_are_to_be_kept_are_kept(tmp_path: Path) -> None:
    with common.folder_of_runs(tmp_path / "a" / "b", "test-") as folder:
        (folder / "output.log").touch()
    assert (tmp_path / "a" / "b" / "output.log").exists()


def test_no_folder_is_anothers() -> None:
    environments = {setting.binaries.parent for setting in TORCHFT_SETTINGS.values()}
    assert len({NVRX_TARGET, TORCHFT_TARGET, *environments}) == 2 + len(environments)


def refuse(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Have pip fail and everything else succeed; returns what is called of pip."""
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], check: bool) -> subprocess.CompletedProcess[str]:
        if "pip" not in command:
            Path(command[-1]).mkdir(parents=True, exist_ok=True)
            return subprocess.CompletedProcess(command, 0)
        assert not check, "pip's own words are enough"
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_an_environment_that_could_not_be_made_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = refuse(monkeypatch)
    monkeypatch.setattr("benchmarks.trainers.run.TARGETS", tmp_path)
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"could not be installed .*--side checkpointless --side checkpoint"):
            make_environment(TORCHFT_SETTINGS["torchft-quick"])
    assert len(asked) == 2


def test_what_cannot_be_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse(monkeypatch)
    with pytest.raises(SystemExit, match=r"one==1 could not be installed into .*/target"):
        common.install_beside(tmp_path / "target", "one==1", "two==2")
    assert asked[0][-2:] == ["one==1", "two==2"]
