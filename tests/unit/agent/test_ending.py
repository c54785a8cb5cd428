"""Test what is written and said last."""

from pathlib import Path

import pytest

from checkpointless.launcher.agent import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.protocol.messages import End
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog


def test_events_that_may_be_lost_are_said_before_the_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.scribe, "flush", lambda: False)
    said: list[str] = []
    config = LaunchConfig(nproc_per_node=1, script=__file__, run_dir=tmp_path)
    events = EventLog(tmp_path / EVENTS_FILE, node=0)
    assert launch._conclude(End(1, ["the end"]), 3, -1, config, events, said.append) == 1
    assert said == [f"the disk of {tmp_path} does not answer: the last events of node 0 may be lost", "the end"]
