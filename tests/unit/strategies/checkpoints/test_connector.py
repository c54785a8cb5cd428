"""Test that the connector passes on how storage is read, which newer versions of Lightning say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from checkpointless.inprocess import StateLostError, UnrecoverableError
from checkpointless.integrations.lightning.checkpoints.connector import CheckpointlessCompatibleConnector

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


@pytest.mark.parametrize(
    ("delayed", "where"),
    [
        (None, "(fit() was given no ckpt_path)"),
        (SimpleNamespace(looks_in="runs/gpt/checkpoints", setup=lambda *_, **__: None), "(looked for in runs/gpt"),
    ],
)
def test_the_last_line_says_where_a_checkpoint_was_looked_for(delayed: Any, where: str) -> None:
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(), lightning_module=None, ckpt_path=None, fresume=delayed
    )
    manager = SimpleNamespace(refusal="all holders died", verdict=None, allow_restart_from_scratch=False)
    call = SimpleNamespace(high_water=4)
    with pytest.raises(StateLostError) as caught:
        CheckpointlessCompatibleConnector(trainer)._from_storage(None, {}, manager, call)
    assert f"all holders died; there is no checkpoint on storage to fall back to {where}" in str(caught.value)


@pytest.mark.parametrize("others", [["x-step=1-last"], []])
def test_a_checkpoint_that_cannot_be_loaded_is_named_and_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    def resume_start(*_: Any, **__: Any) -> None:
        raise RuntimeError("PytorchStreamReader failed reading zip archive: failed finding central directory")

    monkeypatch.setattr(_CheckpointConnector, "resume_start", resume_start)
    damaged = tmp_path / "x-step=3-last" / "weights"
    for folder in (*(tmp_path / each for each in others), damaged):
        folder.mkdir(parents=True)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(), lightning_module=None)
    manager = SimpleNamespace(refusal="all holders died", verdict=None)
    call = SimpleNamespace(high_water=4, generation=1, incident="1")
    with pytest.raises(UnrecoverableError) as caught:
        CheckpointlessCompatibleConnector(trainer)._from_storage(damaged, {}, manager, call)
    said = str(caught.value)
    assert f"the checkpoint {damaged.parent} cannot be loaded (RuntimeError: PytorchStreamReader failed" in said
    assert ("the one before it, x-step=1-last" if others else f"no other is in {tmp_path}") in said
