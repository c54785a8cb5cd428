"""Test what ends a run before it begins, and what its metrics are told."""

from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent.launch import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.monitoring.metrics import JobNames


@pytest.mark.parametrize(("job", "named"), [("llama3_8b_pretrain", "llama3_8b_pretrain"), ("", "test_launch")])
def test_metrics_name_the_recipe_or_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, named: str
) -> None:
    names: list[JobNames] = []

    def run(*args: Any) -> int:
        names.append(args[-1].metrics.names)
        return 0

    monkeypatch.setattr("checkpointless.launcher.agent.launch._run", run)
    config = LaunchConfig(nproc_per_node=1, script=__file__, run_dir=tmp_path / "run", http_port=0, job=job)
    assert launch(config, print) == 0
    assert names == [JobNames(named, str(tmp_path / "run"), __file__)]
    assert names[0].run == "run"
