"""Checkpoints that NeMo marks as unfinished: who removes them, and when."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

logger = logging.getLogger(__name__)

_REMOVAL_S = 10.0
_removing = threading.Lock()  # NeMo removes checkpoints in threads if saves are made in the background
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
    """Remove checkpoints that will not be finished, and NeMo's markers; what cannot be removed stays marked."""
    for path in paths:
        if "://" in path:
            continue
        folder = Path(ckpt_to_dir(path))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            if not folder.exists():
                ModelCheckpoint.format_checkpoint_unfinished_marker_path(path).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("what is left of checkpoint %s could not be removed: %s", folder, error)


def remove_whole(folder: Path) -> None:
    """Remove a whole checkpoint so that, whenever the process is killed, nothing half removed passes for one.

    It gets another name first, which NeMo takes for that of an unfinished checkpoint.

    Raises:
        OSError: it cannot be removed.
    """
    with _removing:
        gone = folder.with_name(f"{folder.name}-removed")
        marker = ModelCheckpoint.format_checkpoint_unfinished_marker_path(gone)
        try:
            marker.touch()
            folder.rename(gone)
        except FileNotFoundError:  # somebody else has removed it
            marker.unlink(missing_ok=True)
            return
        shutil.rmtree(gone)
        marker.unlink()


def wait_for_removals() -> None:
    """Wait until no thread of NeMo's removes a checkpoint any more, or for ten seconds."""
    if _removing.acquire(timeout=_REMOVAL_S):
        _removing.release()
