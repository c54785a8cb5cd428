"""Test what is noted of a trainer: the state of callbacks, and the checkpoints that are there in the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.callbacks.step_recorder import _checkpoint_names

pytestmark = pytest.mark.lightning


def test_a_checkpoint_that_is_being_removed_is_not_there(tmp_path: Path) -> None:
    for name in ("step=3.ckpt", "step=4.ckpt"):
        (tmp_path / name).touch()

    def _remove_checkpoint(path: Path) -> None:  # NeMo gives a thread its function of this name
        time.sleep(0.3)
        path.unlink()

    removal = threading.Thread(target=_remove_checkpoint, args=(tmp_path / "step=3.ckpt",))
    removal.start()
    trainer: Any = SimpleNamespace(callbacks=[ModelCheckpoint(tmp_path)])
    assert _checkpoint_names(trainer) == [["step=4.ckpt"]]
    assert not removal.is_alive()
