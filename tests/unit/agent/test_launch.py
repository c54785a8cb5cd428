"""Test what ends a run before it begins, and what its metrics are told."""

from pathlib import Path

import pytest

from checkpointless.launcher.agent.launch import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.agent.ranks import preload


def test_a_platform_that_is_not_installed_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(group: str, name: str) -> list[EntryPoint]:
        return []

    monkeypatch.setattr(preload, "entry_points", none)
    said: list[str] = []
    config = LaunchConfig(nproc_per_node=1, script=__file__, run_dir=tmp_path / "run", preload=(), cpu=True)
    assert launch(config, said.append) == 1
    (line,) = said
    assert line.startswith("no installed package has the entry point 'cpu' in checkpointless.platforms")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]
