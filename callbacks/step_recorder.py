"""The callback that records what each rank computed, so that two runs can be compared bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, Timer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from checkpointless.callbacks.trainer_parts import job_step
from checkpointless.inprocess import active_call_wrapper
from checkpointless.integrations.torch.repeated_steps import digest_batch, repeated_steps
from checkpointless.observability.telemetry.steps import StepLog
from checkpointless.recovery.manager import manager_of
from checkpointless.state.serialization.digest import (
    MemoryChecksumManager,
    digest_buffers,
    digest_parameters,
    digest_value,
)

_CHECKPOINT_SUFFIX = ".ckpt"
#: A folder with one of these in it is a checkpoint of NeMo, Megatron or torch's distributed checkpointing.
_CHECKPOINT_PARTS = ("weights", "metadata.json", ".metadata")
_REMOVAL = "(_remove_checkpoint)"  # Python names a thread after the function that it runs
_REMOVED_S = 30.0


def _complete_parameters(trainer: pl.Trainer) -> None:
    """Make Megatron finish the parameter gather that it would leave to the next forward pass. Collective."""
    strategy: Any = trainer.strategy
    if getattr(getattr(strategy, "ddp_config", None), "overlap_param_gather", False):
        strategy.megatron_parallel.force_param_sync()


def _extras_of(trainer: pl.Trainer, step: int, batch: str | None = None) -> dict[str, Any]:
    """Return what is recorded of a trainer besides loss and parameters. A ``state_dict`` may be collective."""
    manager = manager_of(active_call_wrapper())
    strategy: Any = trainer.strategy
    journal = strategy.journal() if hasattr(strategy, "journal") else None
    optimizers: list[Any] = list(trainer.strategy.optimizers)
    rates = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
    return dict(
        buffers=digest_buffers(filter(None, [trainer.strategy.model])),
        lr=tuple(float(rate).hex() for rate in rates if rate is not None),
        loss_scale=_loss_scales(trainer, optimizers),
        callbacks=_callback_digests(trainer),
        module=_module_digest(trainer),
        data=_data_digest(trainer),
        optimizer=MemoryChecksumManager().digest_all(journal.state.shard()) if journal is not None else None,
        own=manager.own.streams.digests(step) if manager is not None else None,
        batch=batch,
        epoch=trainer.current_epoch,
        fit=_fit(trainer),
    )


def _callback_digests(trainer: pl.Trainer) -> dict[str, str]:
    """Return a digest of each callback's state by its state key, without timers and folders to save to."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    states = {each.state_key: _state_of(each) for each in callbacks if not isinstance(each, Timer)}
    return {key: digest_value(state) for key, state in states.items() if state}


def _validation_metrics(trainer: pl.Trainer) -> dict[str, float]:
    results: Any = trainer._results
    logged = {item.meta.name for item in results.result_metrics} if results else set()
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if _logged_as(name) in logged and torch.as_tensor(value).numel() == 1
    }


def _checkpoint_names(trainer: pl.Trainer) -> list[list[str]]:
    """Return the names of the checkpoints in each folder that a callback saves to, once no thread removes them."""
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
    def is_checkpoint(path: Path) -> bool:
        return path.suffix == _CHECKPOINT_SUFFIX or any((path / part).exists() for part in _CHECKPOINT_PARTS)

    return [path.name for path in folder.glob("*") if is_checkpoint(path)]


def _logged_as(name: str) -> str:
    name = name.partition("/dataloader_idx_")[0]
    return name.removesuffix("_epoch") if name.endswith("_epoch") else name


def _loss_scales(trainer: pl.Trainer, optimizers: list[Any]) -> tuple[str, ...] | None:
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
    datamodule: Any = getattr(trainer, "datamodule", None)
    state = datamodule.state_dict() if datamodule is not None else None
    return digest_value(state) if state else None


_Loss = torch.Tensor | float


class StepRecorder(Callback):
    """Writes what every optimizer step and validation of this rank computed (``--record-steps``).

    A step that was committed while a fault was handled, before it could be recorded, is recorded when training
    resumes: its loss was kept with the rank's random streams, and everything else is in place.

    Args:
        log: the log to write to.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._caught_up = False
        self._recorded = 0
        self._batch: str | None = None

    @classmethod
    def from_environment(cls) -> StepRecorder | None:
        """Return the recorder that ``--record-steps`` asks this process for, or None."""
        log = StepLog.from_environment()
        return cls(log) if log is not None else None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the step that training resumes at if the fault came too early, as a validation may follow it."""
        self._catch_up(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the step that training resumed at, if nothing started after it; then record the checkpoints."""
        self._catch_up(trainer)
        names = _checkpoint_names(trainer)
        if names and self._log.rank == 0:
            self._log.record_checkpoints(names)

    def _catch_up(self, trainer: pl.Trainer) -> None:
        if self._caught_up:
            return
        self._caught_up = True
        call = active_call_wrapper()
        manager = manager_of(call)
        step = job_step(trainer)
        if manager is None or call is None or call.generation == 0 or trainer.global_step == 0:
            return
        # Every rank does this, whether it lacks the step or not. The parameters are whole: recovery gathered them.
        params, extras = _digest_of_parameters(trainer), _extras_of(trainer, step)
        states = manager.own.streams.newest(step)
        if (self._log.last_step() or 0) < step and states is not None and states.loss is not None:
            _leave_if_over()
            repeated_steps.record(self._log, step, states.loss, params, **extras)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch; a strategy may give an iterator in its place."""
        self._batch = None if isinstance(batch, Iterator) else digest_batch(batch) or None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, if the batch completed one."""
        if trainer.global_step == self._recorded or trainer.fit_loop._should_accumulate():
            return
        self._recorded = trainer.global_step
        step = job_step(trainer)
        # Every rank does this, even if it recorded the step before a fault: what is recorded may be collective.
        _complete_parameters(trainer)
        params, extras = _digest_of_parameters(trainer), _extras_of(trainer, step, self._batch)
        if getattr(trainer.strategy, "replaying", False) and (self._log.last_step() or 0) >= step:
            return
        loss = loss_of(outputs)
        _leave_if_over()
        repeated_steps.record(self._log, step, loss, params, **extras)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what the validation ended with, if it is part of the training."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            metrics, callbacks = _validation_metrics(trainer), _callback_digests(trainer)
            _leave_if_over()
            self._log.record_validation(job_step(trainer), metrics, callbacks)


def _leave_if_over() -> None:
    """Leave the block instead of recording what may follow from collectives that were aborted."""
    call = active_call_wrapper()
    if call is not None:
        call.leave_if_over()


def _fit(trainer: pl.Trainer) -> int:
    manager = getattr(trainer.strategy, "checkpoint_manager", None)
    return max(1, manager.fits.number) if manager is not None else 1


def _digest_of_parameters(trainer: pl.Trainer) -> str:
    return digest_parameters(filter(None, [trainer.strategy.model]))


def loss_of(outputs: dict[str, _Loss] | _Loss | None) -> float:
    """Return the loss in what a training step returned: a number, a tensor with one element, or a dict with it."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None:
        raise ValueError("the training step returned no loss to record")
    return float(loss.item() if isinstance(loss, torch.Tensor) else loss)
