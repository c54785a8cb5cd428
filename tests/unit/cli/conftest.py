"""Provide what the command line would launch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
