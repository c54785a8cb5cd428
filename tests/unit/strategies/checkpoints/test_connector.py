"""Test that the connector passes on how storage is read, which newer versions of Lightning say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from checkpointless.strategies.checkpoints.connector import CheckpointlessCompatibleConnector

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize("options", [{}, {"weights_only": True}], ids=["2.4", "2.6"])
def test_how_storage_is_read_is_passed_on(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        _CheckpointConnector, "resume_start", lambda _, path, **options: asked.append((path, options))
    )
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(), lightning_module=None)
    CheckpointlessCompatibleConnector(trainer).resume_start("a.ckpt", **options)
    assert asked == [("a.ckpt", options)]
