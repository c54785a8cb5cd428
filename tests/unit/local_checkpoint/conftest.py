"""Provide a manager of a job of one process, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.recovery import LocalCheckpointManager


@pytest.fixture
def manager(tmp_path: Path) -> LocalCheckpointManager:
    return LocalCheckpointManager(tmp_path / "local" / "checkpoints")


def files(folder: Path, iteration: int | None = None) -> list[Path]:
    """Return the files of the manager of these tests: all, or those of one iteration."""
    pattern = "*" if iteration is None else f"iter_{iteration:010d}*"
    return sorted((folder / "local" / "checkpoints").glob(pattern))
