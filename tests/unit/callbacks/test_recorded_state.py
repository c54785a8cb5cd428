"""Test what is noted of a trainer: the checkpoints that are there when nothing removes any more."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.callbacks.recorded_state import checkpoint_names


def test_a_checkpoint_that_is_being_removed_is_not_there(tmp_path: Path) -> None:
    for name in ("step=3.ckpt", "step=4.ckpt"):
        (tmp_path / name).touch()

    def _remove_checkpoint(path: Path) -> None:  # NeMo gives a thread its function of this name
        time.sleep(0.3)
        path.unlink()

    removal = threading.Thread(target=_remove_checkpoint, args=(tmp_path / "step=3.ckpt",))
    removal.start()
    trainer: Any = SimpleNamespace(callbacks=[ModelCheckpoint(tmp_path)])
    assert checkpoint_names(trainer) == [["step=4.ckpt"]]
    assert not removal.is_alive()
