"""Test what is noted of a trainer: the state of callbacks, and the checkpoints that are there in the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.callbacks.step_recorder import _callback_digests, _checkpoint_names

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


def test_where_checkpoints_are_written_is_not_what_was_computed(tmp_path: Path) -> None:
    digests = []
    for folder, metric in (("calm", 0.5), ("rough", 0.5), ("rough", 0.25)):
        callback = ModelCheckpoint(tmp_path / folder, monitor="loss")
        callback.best_model_path = str(tmp_path / folder / "step=4.ckpt")
        callback.best_k_models = {callback.best_model_path: torch.tensor(metric)}
        trainer: Any = SimpleNamespace(callbacks=[callback])
        digests.append(_callback_digests(trainer))
    assert digests[0] == digests[1] != digests[2]
