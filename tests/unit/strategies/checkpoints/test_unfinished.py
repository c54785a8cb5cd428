"""Test that a checkpoint that is removed is whole or marked at every moment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nemo


def checkpoint(folder: Path) -> Path:
    path = folder / "it-step=3-last"
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "metadata.json").touch()
    return path


def test_a_kill_while_a_checkpoint_is_removed_leaves_nothing_that_passes_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    from checkpointless.integrations.lightning.checkpoints.saves import remove_whole

    path = checkpoint(tmp_path)

    def killed(folder: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as here:
        here.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_whole(path)
    assert not path.exists()
    (left,) = (each for each in tmp_path.iterdir() if each.is_dir())
    assert ModelCheckpoint.is_checkpoint_unfinished(left)
    ModelCheckpoint._remove_unfinished_checkpoints(tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_checkpoint_that_is_removed(tmp_path: Path) -> None:
    from checkpointless.integrations.lightning.checkpoints.saves import remove_whole

    remove_whole(checkpoint(tmp_path))
    remove_whole(tmp_path / "it-step=5-last")  # somebody else has
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_removed_stays_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint

    from checkpointless.integrations.lightning.checkpoints.saves import remove

    path = checkpoint(tmp_path)
    ModelCheckpoint.set_checkpoint_unfinished_marker(path)
    with monkeypatch.context() as here:
        here.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove([str(path)])
    assert ModelCheckpoint.is_checkpoint_unfinished(path)
    remove([str(path)])
    assert not list(tmp_path.iterdir())
