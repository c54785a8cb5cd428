"""Lightning's and NeMo's checkpoint callbacks, which keep their books right when a save fails."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from nemo.lightning.callback_group import CallbackGroup
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.patches import Patch, Patches
from checkpointless.strategies.checkpoints.bookkeeping import Bookkeeping
from checkpointless.strategies.checkpoints.failed_saves import FailedSaves
from checkpointless.strategies.checkpoints.save_failed import SaveFailed
from checkpointless.strategies.checkpoints.tolerance import tolerant_writes

logger = logging.getLogger(__name__)

_patches = Patches()


def install() -> None:
    """Make the callbacks of trainers with our strategy outlive saves that fail. Idempotent."""
    if _patches.are_made:
        return
    books = "a save that failed must not stay in the books, and what it replaces must not be removed"
    _patches.make(
        [
            Patch(LightningModelCheckpoint, "_save_topk_checkpoint", _with_books, books),
            Patch(LightningModelCheckpoint, "_save_last_checkpoint", _with_books, books),
            Patch(ModelCheckpoint, "_get_finalize_save_checkpoint_callback", _agreed, "it takes the marker away"),
            Patch(ModelCheckpoint, "_remove_checkpoint", _removing, "the marker of what is removed may fail"),
        ]
    )


def _failed_saves(trainer: Any) -> FailedSaves | None:
    """Return what the trainer's strategy does about saves that fail; None: it leaves them to the frameworks."""
    return getattr(trainer.strategy, "failed_saves", None)


def _with_books(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``original``, which saves, with the books put back if the save fails."""

    @functools.wraps(original)
    def save(callback: Any, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        failures = _failed_saves(trainer)
        if failures is None:
            original(callback, trainer, monitor_candidates)
            return
        before = Bookkeeping.of(callback)
        try:
            with tolerant_writes(failures.errors), failures.caught():
                original(callback, trainer, monitor_candidates)
        except SaveFailed:
            before.put_back(callback)
            callback._last_global_step_saved = trainer.global_step  # it is not tried again in the same step
            CallbackGroup.get_instance().on_save_checkpoint_end()
            return
        if getattr(callback, "async_save", False):
            for path in before.new_paths(callback):
                failures.keep(path, before.changed(callback))

    return save


def _agreed(original: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    """Return ``original``, whose functions end a save, with an agreement of all ranks before that."""

    @functools.wraps(original)
    def get(callback: Any, trainer: Any, filepath: str, global_step: int) -> Callable[[], None]:
        finish = original(callback, trainer, filepath, global_step)
        failures = _failed_saves(trainer)
        return finish if failures is None else functools.partial(failures.end, str(filepath), finish)

    return get


def _removing(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``original``, which removes a checkpoint, with a warning where its marker cannot be written."""

    @functools.wraps(original)
    def remove(callback: Any, trainer: Any, filepath: str, override_async: bool = False) -> None:
        failures = _failed_saves(trainer)
        if failures is None:
            original(callback, trainer, filepath, override_async)
            return
        with tolerant_writes(failures.errors):
            original(callback, trainer, filepath, override_async)
        error = failures.errors.take(filepath)
        if error:
            logger.warning(
                "the marker of a checkpoint that is removed, %s, could not be written: %s", filepath, error
            )

    return remove
