"""Provide what the command line would launch."""

import itertools
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.cli import main
from checkpointless.launcher.agent import launch as launch_module
from checkpointless.launcher.agent.launch_config import LaunchConfig


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> list[LaunchConfig]:
    """Return what would have been launched, from a working directory that holds only ``train.py``.

    A launch returns the ``LAUNCH_CODE`` of the test's module, or 0.
    """
    configs: list[LaunchConfig] = []

    def record(config: LaunchConfig, *_more: object) -> int:
        configs.append(config)
        return getattr(request.module, "LAUNCH_CODE", 0)

    monkeypatch.setattr(launch_module, "launch", record)
    monkeypatch.setenv("CHECKPOINTLESS_TOKEN", "x" * 32)
    monkeypatch.delenv("CHECKPOINTLESS_CPU", raising=False)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return configs


def words_of(command: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of a command that is written as for a shell; set the variables before it."""
    words = shlex.split(command)
    variables = list(itertools.takewhile(lambda word: "=" in word, words))
    for variable in variables:
        monkeypatch.setenv(*variable.split("=", 1))
    return words[len(variables) :]


def status_of(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else -1


Refused = Callable[[str], str]


@pytest.fixture
def refused(
    launched: list[LaunchConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Return a function that runs a command that starts and leaves nothing, and returns the line that says why."""

    def refuse(command: str) -> str:
        assert status_of(words_of(command, monkeypatch)) == 2
        out, err = capsys.readouterr()
        *before, last = err.splitlines()
        assert out == ""
        assert last.startswith("checkpointless: error: ")
        assert all(line.startswith("checkpointless: ") for line in before)
        assert (launched, [path.name for path in Path.cwd().iterdir()]) == ([], ["train.py"])
        return last

    return refuse
