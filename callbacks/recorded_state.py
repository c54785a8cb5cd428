"""What ``--record-steps`` records of a trainer besides loss and parameters."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, Timer
from lightning.pytorch.utilities.model_helpers import is_overridden

from checkpointless.inprocess import active_call_wrapper
from checkpointless.observability.telemetry.steps import StepExtras
from checkpointless.recovery.running import manager_of
from checkpointless.state.serialization.digest import MemoryChecksumManager, digest_buffers, digest_value

_CHECKPOINT_SUFFIX = ".ckpt"
#: A folder with one of these in it is a checkpoint of NeMo, Megatron or torch's distributed checkpointing.
_CHECKPOINT_PARTS = ("weights", "metadata.json", ".metadata")
_REMOVAL = "(_remove_checkpoint)"  # Python names a thread after the function that it runs
_REMOVED_S = 30.0


def complete_parameters(trainer: pl.Trainer) -> None:
    """Make Megatron finish the parameter gather that it would leave to the next forward pass. Collective.

    With ``overlap_param_gather`` a rank has only its own shard of the new parameters after a step. The gather gives
    the same bytes whenever it is made; NeMo also makes it before it saves a checkpoint.
    """
    strategy: Any = trainer.strategy
    if getattr(getattr(strategy, "ddp_config", None), "overlap_param_gather", False):
        strategy.megatron_parallel.force_param_sync()


def extras_of(trainer: pl.Trainer, step: int, batch: str | None = None) -> StepExtras:
    """Return what is recorded of a trainer as of now, besides loss and parameters.

    Every rank must call it at the same places, because a ``state_dict`` may be collective.

    Args:
        trainer: the trainer.
        step: the newest step of the job.
        batch: digest of the last batch of that step; None if it is not known.
    """
    manager = manager_of(active_call_wrapper())
    strategy: Any = trainer.strategy
    journal = strategy.journal() if hasattr(strategy, "journal") else None
    optimizers: list[Any] = list(trainer.strategy.optimizers)
    rates = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
    return StepExtras(
        buffers=digest_buffers(filter(None, [trainer.strategy.model])),
        lr=tuple(float(rate).hex() for rate in rates if rate is not None),
        loss_scale=_loss_scales(trainer, optimizers),
        callbacks=callback_digests(trainer),
        module=_module_digest(trainer),
        data=_data_digest(trainer),
        optimizer=MemoryChecksumManager().digest_all(journal.state.shard()) if journal is not None else None,
        own=manager.own.streams.digests(step) if manager is not None else None,
        batch=batch,
        epoch=trainer.current_epoch,
    )


def callback_digests(trainer: pl.Trainer) -> dict[str, str]:
    """Return a digest of each callback's state by its state key.

    Timers are left out, which differ in every run. So is the folder that a callback saves to, because where a run
    writes is not what it computed.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    states = {each.state_key: _state_of(each) for each in callbacks if not isinstance(each, Timer)}
    return {key: digest_value(state) for key, state in states.items() if state}


def validation_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Return what the validation that is ending has logged, as numbers by name."""
    results: Any = trainer._results
    logged = {item.meta.name for item in results.result_metrics} if results else set()
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if _logged_as(name) in logged and torch.as_tensor(value).numel() == 1
    }


def checkpoint_names(trainer: pl.Trainer) -> list[list[str]]:
    """Return the names of the checkpoints in each local folder that a callback of the trainer saves to.

    With asynchronous saves NeMo removes checkpoints in separate threads, which are waited for.
    """
    for thread in threading.enumerate():
        if _REMOVAL in thread.name:
            thread.join(_REMOVED_S)
    folders: dict[Path, None] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        folder = getattr(callback, "dirpath", None)
        if isinstance(callback, Checkpoint) and folder is not None and "://" not in str(folder):
            folders[Path(folder)] = None
    return [_names(folder) for folder in folders]


def _state_of(callback: Callback) -> dict[str, Any]:
    state = callback.state_dict()
    if isinstance(callback, Checkpoint):
        return {key: value for key, value in state.items() if key != "dirpath"}
    return state


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if _is_checkpoint(entry)]
    except FileNotFoundError:  # nothing was saved yet
        return []


def _is_checkpoint(entry: os.DirEntry[str]) -> bool:
    if entry.name.endswith(_CHECKPOINT_SUFFIX):
        return True
    return entry.is_dir() and any((Path(entry.path) / part).exists() for part in _CHECKPOINT_PARTS)


def _logged_as(name: str) -> str:
    """Return the name that was passed to ``log`` for what Lightning calls ``name``."""
    name = name.partition("/dataloader_idx_")[0]
    return name.removesuffix("_epoch") if name.endswith("_epoch") else name


def _loss_scales(trainer: pl.Trainer, optimizers: list[Any]) -> tuple[str, ...] | None:
    """Return the state of every loss scaler as text, or None if nothing is scaled."""
    megatron = [getattr(optimizer, "mcore_optimizer", None) for optimizer in optimizers]
    parts = [part for each in megatron if each is not None for part in getattr(each, "chained_optimizers", [each])]
    scalers = [getattr(part, "grad_scaler", None) for part in parts]
    scalers.append(getattr(trainer.precision_plugin, "scaler", None))
    return tuple(_scaler_text(scaler.state_dict()) for scaler in scalers if scaler is not None) or None


def _scaler_text(state: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={float(value).hex()}" for name, value in sorted(state.items()))


def _module_digest(trainer: pl.Trainer) -> str | None:
    """Return a digest of what the module's ``on_save_checkpoint`` adds to a checkpoint; None without that hook."""
    module = trainer.lightning_module
    if not is_overridden("on_save_checkpoint", module):
        return None
    known = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": trainer.strategy.lightning_module_state_dict(),
        "loops": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    checkpoint: dict[str, Any] = dict(known)
    module.on_save_checkpoint(checkpoint)
    return digest_value({key: value for key, value in checkpoint.items() if key not in known})


def _data_digest(trainer: pl.Trainer) -> str | None:
    """Return a digest of the data module's state, or None if it has no state."""
    datamodule: Any = getattr(trainer, "datamodule", None)
    state = datamodule.state_dict() if datamodule is not None else None
    return digest_value(state) if state else None
