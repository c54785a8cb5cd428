"""Lightning's and NeMo's checkpoint callbacks, which keep their books right when a save fails."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from nemo.lightning.callback_group import CallbackGroup
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.integrations.lightning.checkpoints.failed_saves import FailedSaves, SaveFailed, noting
from checkpointless.integrations.lightning.checkpoints.writers import write_buckets
from checkpointless.system.patches import Patch, Patches

_patches = Patches()


def install() -> None:
    """Make the saves of trainers with our strategy outlive what fails in them. Idempotent."""
    if _patches.are_made:
        return
    books = "a save that failed must not stay in the books, and what it replaces must not be removed"
    alone = "one rank writes it, and the others wait"
    killed = "a writer that is killed is waited for for ever"
    writer, buckets = FileSystemWriterAsync, staticmethod(write_buckets)
    _patches.make(
        [
            Patch(LightningModelCheckpoint, "_save_topk_checkpoint", _with_books, books),
            Patch(LightningModelCheckpoint, "_save_last_checkpoint", _with_books, books),
            Patch(ModelCheckpoint, "set_checkpoint_unfinished_marker", _marking, alone),
            Patch(TorchCommonSaveStrategy, "save_common", noting(lambda _strategy, _state, folder: folder), alone),
            Patch(serialization, "save_config", noting(lambda _config, folder: folder), alone),
            Patch(writer, "finish", noting(lambda self, *_: self.checkpoint_dir), alone),
            Patch(writer, "write_preloaded_data_multiproc", lambda _: buckets, killed),
        ]
    )


def _with_books(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``original``, which saves, with the books put back if the save fails."""

    @functools.wraps(original)
    def save(callback: Any, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        failed: FailedSaves | None = getattr(trainer.strategy, "failed_saves", None)
        if failed is None:  # of another strategy, or outside of a fit
            original(callback, trainer, monitor_candidates)
            return
        books = _books_of(callback)
        try:
            with failed.handling():
                original(callback, trainer, monitor_candidates)
        except SaveFailed:
            vars(callback).update(books)
            callback._last_global_step_saved = trainer.global_step  # it is not tried again in the same step
            CallbackGroup.get_instance().on_save_checkpoint_end()
            return
        if getattr(callback, "async_save", False):
            for path in _new_paths(callback, books):
                trainer.strategy.checkpoint_manager.saves.keep(path, callback, books)

    return save


def _marking(original: Callable[..., None]) -> Any:
    """Return ``original``, which marks a checkpoint as unfinished, with its error kept until the ranks have met."""
    mark = noting(lambda path: path)(original)

    @functools.wraps(original)
    def marking(checkpoint_path: str | Path, barrier_after: bool = False) -> None:
        mark(checkpoint_path)
        if barrier_after and dist.is_initialized():
            dist.barrier()

    return staticmethod(marking)


# --- books --------------------------------------------------------------------------------------------------------

#: What a background save has replaced in a callback's books, as plain data: ``models``, which are no longer among
#: the best, with their scores; ``best`` and ``last``, the best model and the last checkpoint before it.
Replaced = dict[str, Any]


def _books_of(callback: LightningModelCheckpoint) -> dict[str, Any]:
    """Return a copy of all that ``callback`` knows, to put it back with ``vars(callback).update(books)``."""
    return {
        name: copy.copy(value) if isinstance(value, list | dict) else value
        for name, value in vars(callback).items()
    }


def _new_paths(callback: LightningModelCheckpoint, books: dict[str, Any]) -> list[str]:
    """Return the paths that ``callback`` has begun to believe in since its books were ``books``."""
    then = {*books["best_k_models"], books["best_model_path"], books["last_model_path"], ""}
    now = [*callback.best_k_models, callback.best_model_path, callback.last_model_path]
    return list(dict.fromkeys(path for path in now if path not in then))


def replaced(callback: LightningModelCheckpoint, books: Mapping[str, Any]) -> Replaced:
    """Return what a save of ``callback`` has replaced since its books were ``books``."""
    models = books["best_k_models"].items()
    gone = {path: float(score) for path, score in models if path not in callback.best_k_models}
    return {"models": gone, "best": str(books["best_model_path"]), "last": str(books["last_model_path"])}


def undo(callback: object, path: str, was: Replaced) -> None:
    """Strike a save that failed out of a callback's books, and take back what it replaced.

    Args:
        callback: any callback; one that keeps no such books stays as it is.
        was: what the save has replaced; empty: nothing is known of it.
    """
    if not isinstance(callback, LightningModelCheckpoint):
        return
    known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}
    failed = {each for each in known if ckpt_to_dir(each) == ckpt_to_dir(path)}
    if not failed:
        return
    scores = {each: torch.tensor(score) for each, score in was.get("models", {}).items()}
    models = scores | {each: score for each, score in callback.best_k_models.items() if each not in failed}
    callback.best_k_models = models
    if callback.last_model_path in failed:
        callback.last_model_path = was.get("last", "")
    links = getattr(callback, "ckpts_to_link", {})
    for each in [each for each in links if ckpt_to_dir(each) == ckpt_to_dir(path)]:
        del links[each]
    if callback.monitor is None:
        if callback.best_model_path in failed:
            callback.best_model_path = was.get("best", "")
        return
    by_score = sorted(models, key=lambda each: float(models[each]), reverse=callback.mode != "min")
    callback.best_model_path, callback.kth_best_model_path = (by_score[0], by_score[-1]) if by_score else ("", "")
    callback.best_model_score = models[by_score[0]] if by_score else None
    callback.kth_value = models[by_score[-1]] if by_score else None  # type: ignore[assignment]  # as NeMo does
