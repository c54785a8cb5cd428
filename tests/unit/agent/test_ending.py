"""Test what is written and said last."""

from pathlib import Path

import pytest

from checkpointless.launcher.agent import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.protocol.messages import End
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog


def conclude(outcome: End, run_dir: Path, generation: int = 3) -> tuple[int, list[str]]:
    """Conclude a job, and return the exit code and what was said."""
    said: list[str] = []
    config = LaunchConfig(nproc_per_node=1, script=__file__, run_dir=run_dir)
    events = EventLog(run_dir / EVENTS_FILE, node=0)
    code = launch._conclude(outcome, generation, -1, config, events, said.append)
    return code, said


def test_events_that_may_be_lost_are_said_before_the_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.scribe, "flush", lambda: False)
    code, (first, last) = conclude(End(1, ["the end"]), tmp_path)
    assert (code, last) == (1, "the end")
    assert first == f"the disk of {tmp_path} does not answer: the last events of node 0 may be lost"
