"""Provide a manager of a job of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.recovery import LocalCheckpointManager


@pytest.fixture
def manager(tmp_path: Path) -> LocalCheckpointManager:
    return LocalCheckpointManager(tmp_path / "local" / "checkpoints")
