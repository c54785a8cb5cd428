"""What benchmarks compare with lies beside them, each in a folder of its own, or is said to be missing."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.reentry.run import NVRX_TARGET
from benchmarks.trainers.run import TORCHFT_SETTINGS, make_environment
from benchmarks.transfer.run import TORCHFT_TARGET


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
