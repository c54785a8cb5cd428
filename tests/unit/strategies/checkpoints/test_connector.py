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
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(restores_from_storage=lambda: None), lightning_module=None
    )
    manager = SimpleNamespace(refusal="all holders died", verdict=None)
    call = SimpleNamespace(high_water=4, generation=1, incident="1")
    with pytest.raises(UnrecoverableError) as caught:
        CheckpointlessCompatibleConnector(trainer)._from_storage(damaged, {}, manager, call)
    said = str(caught.value)
    assert f"the checkpoint {damaged.parent} cannot be loaded (RuntimeError: PytorchStreamReader failed" in said
    assert ("the one before it, x-step=1-last" if others else f"no other is in {tmp_path}") in said


# --- Where NeMo's checkpoints are looked for after a fault --------------------------------------------------------


def test_every_rank_looks_in_the_folder_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo's logger names a folder by the time, and does so on rank 0 only."""
    from nemo.lightning.resume import AutoResume
    from nemo.utils.app_state import AppState

    from checkpointless.integrations.lightning.checkpoints import auto_resume

    looked: list[tuple[Any, str]] = []
    again = auto_resume.CheckpointlessAutoResume(resume_if_exists=True)
    monkeypatch.setattr(AutoResume, "setup", lambda *_: looked.append((AppState().log_dir, again.looks_in)))
    monkeypatch.setattr(auto_resume, "active_call_wrapper", lambda: SimpleNamespace(generation=1))
    monkeypatch.setattr(auto_resume.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(auto_resume, "all_gather_json", lambda mine: ["runs/gpt/2026-11-26_12-00-00", mine])
    monkeypatch.setattr(AppState(), "log_dir", Path("runs/gpt"))
    trainer = SimpleNamespace()
    again.setup(trainer)
    assert (trainer.fresume, looked) == (again, []), "memory is asked first"
    again.setup(trainer, force_setup=True)
    folder = Path("runs/gpt/2026-11-26_12-00-00")
    assert looked == [(folder, str(folder / "checkpoints"))]
    assert auto_resume.CheckpointlessAutoResume(resume_from_path="a/b").looks_in == "a/b"
