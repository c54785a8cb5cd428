"""Test what the demo says when it is stopped, or fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.testing.demo import run
from checkpointless.testing.demo.config import DemoConfig


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
    pytest.importorskip("omegaconf", reason="the demo's recipes need hydra-core")
    started = []

    def end(config: LaunchConfig, say: Callable[[str], None]) -> int:
        started.append(config.run_dir)
        say(last)
        return 1

    monkeypatch.setattr(run, "launch", end)
    assert run.run_demo(DemoConfig(run_dir=tmp_path / "runs")) == 1
    said = capsys.readouterr().out
    assert len(started) == 1  # and no second one
    assert last in said
    assert ("ended with exit code 1; its logs" in said.replace("\n", " ")) == asks_to_look
    assert "done in" not in said
