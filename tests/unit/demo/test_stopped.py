"""Test what the demo says when it is stopped, or fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.cli.commands.demo import _run_demo
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.testing.demo.trainers import TRAINERS, Task


@pytest.mark.parametrize(
    ("last", "asks_to_look"), [("stopped by SIGINT", False), ("rank 1 raised ValueError", True)]
)
def test_a_demo_that_was_stopped_is_not_a_demo_that_failed(
    last: str,
    asks_to_look: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = []

    def end(config: LaunchConfig, say: Callable[[str], None]) -> int:
        started.append(config.run_dir)
        say(last)
        return 1

    monkeypatch.setattr("checkpointless.launcher.agent.launch.launch", end)
    assert _run_demo(TRAINERS["ddp"], Task(nproc=2, steps=3), [], tmp_path / "runs") == 1
    said = capsys.readouterr().err
    assert len(started) == 1  # and no second one
    assert last in said
    assert ("ended with exit code 1; its logs" in said.replace("\n", " ")) == asks_to_look
