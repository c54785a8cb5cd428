"""Test where NeMo's checkpoints are looked for after a fault."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.nemo


def test_every_rank_looks_in_the_folder_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo's logger names a folder by the time, and does so on rank 0 only."""
    from nemo.lightning.resume import AutoResume
    from nemo.utils.app_state import AppState

    from checkpointless.integrations.lightning.checkpoints import copies

    looked: list[tuple[Any, str]] = []
    again = copies.CheckpointlessAutoResume(resume_if_exists=True)
    monkeypatch.setattr(AutoResume, "setup", lambda *_: looked.append((AppState().log_dir, again.looks_in)))
    monkeypatch.setattr(copies, "active_call_wrapper", lambda: SimpleNamespace(generation=1))
    monkeypatch.setattr(copies.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(copies, "all_gather_json", lambda mine: ["runs/gpt/2026-11-26_12-00-00", mine])
    monkeypatch.setattr(AppState(), "log_dir", Path("runs/gpt"))
    trainer = SimpleNamespace()
    again.setup(trainer)
    assert (trainer.fresume, looked) == (again, []), "memory is asked first"
    again.setup(trainer, force_setup=True)
    folder = Path("runs/gpt/2026-11-26_12-00-00")
    assert looked == [(folder, str(folder / "checkpoints"))]
    assert copies.CheckpointlessAutoResume(resume_from_path="a/b").looks_in == "a/b"
