"""Provide fixtures for tests that run the shell scripts of recipes/launch."""

from pathlib import Path

import pytest

from tests.unit.recipes.launch.scripts import FAKE_AGENT, FAKE_COORDINATOR, put


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    put(folder, "checkpointless", FAKE_AGENT)
    put(tmp_path, "coordinator.py", FAKE_COORDINATOR)
    return folder
