"""Checkpoints that NeMo marks as unfinished: who removes them, and when."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

_REMOVE = ModelCheckpoint.__dict__["_remove_unfinished_checkpoints"]


def leave_unfinished(leave: bool) -> None:
    """Set whether NeMo must leave unfinished checkpoints at a trainer's set-up: it must while they are written."""
    name = "_remove_unfinished_checkpoints"
    setattr(ModelCheckpoint, name, staticmethod(lambda *_: None) if leave else _REMOVE)


def remove_unfinished(callbacks: Iterable[Any]) -> None:
    """Remove unfinished checkpoints, as NeMo does at a trainer's set-up unless it was told to leave them."""
    for each in callbacks:
        if isinstance(each, ModelCheckpoint) and each.dirpath is not None:
            _REMOVE.__func__(each.dirpath)


def remove(paths: Iterable[str]) -> None:
    """Remove checkpoints that will not be finished, and NeMo's markers of them."""
    for path in paths:
        if "://" not in path:
            shutil.rmtree(ckpt_to_dir(path), ignore_errors=True)
            ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).unlink(missing_ok=True)
