"""The callback that records what each rank computed, so that two runs can be compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from checkpointless.callbacks.recorded_state import (
    callback_digests,
    checkpoint_names,
    complete_parameters,
    extras_of,
    validation_metrics,
)
from checkpointless.inprocess import active_call_wrapper
from checkpointless.integrations.torch.repeated_steps import digest_batch, repeated_steps
from checkpointless.observability.telemetry.steps import StepLog
from checkpointless.recovery.running import manager_of
from checkpointless.state.serialization.digest import digest_parameters

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
        names = checkpoint_names(trainer)
        if names and self._log.rank == 0:
            self._log.record_checkpoints(names)

    def _catch_up(self, trainer: pl.Trainer) -> None:
        if self._caught_up:
            return
        self._caught_up = True
        call = active_call_wrapper()
        manager = manager_of(call)
        step = _job_step(trainer)
        if manager is None or call is None or call.generation == 0 or trainer.global_step == 0:
            return
        # Every rank does this, whether it lacks the step or not. The parameters are whole: recovery gathered them.
        params, extras = _digest_of_parameters(trainer), extras_of(trainer, step)
        states = manager.rng_of(step)
        if (self._log.last_step() or 0) < step and states is not None and states.loss is not None:
            _leave_if_over()
            repeated_steps.record(self._log, step, states.loss, params, extras, _fit(trainer))

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
        step = _job_step(trainer)
        # Every rank does this, even if it recorded the step before a fault: what is recorded may be collective.
        complete_parameters(trainer)
        params, extras = _digest_of_parameters(trainer), extras_of(trainer, step, self._batch)
        if getattr(trainer.strategy, "replaying", False) and (self._log.last_step() or 0) >= step:
            return
        loss = loss_of(outputs)
        _leave_if_over()
        repeated_steps.record(self._log, step, loss, params, extras, _fit(trainer))

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what the validation ended with, if it is part of the training."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            metrics, callbacks = validation_metrics(trainer), callback_digests(trainer)
            _leave_if_over()
            self._log.record_validation(_job_step(trainer), metrics, callbacks)


def _leave_if_over() -> None:
    """Leave the block instead of recording what may follow from collectives that were aborted."""
    call = active_call_wrapper()
    if call is not None:
        call.leave_if_over()


def _job_step(trainer: pl.Trainer) -> int:
    """Return the step that the trainer is at; a checkpointless strategy counts steps over all fits of a block."""
    manager = getattr(trainer.strategy, "checkpoint_manager", None)
    return int(trainer.global_step) + (manager.offset if manager is not None else 0)


def _fit(trainer: pl.Trainer) -> int:
    """Return the number of the fit in the block, counted from 1."""
    manager = getattr(trainer.strategy, "checkpoint_manager", None)
    return max(1, manager.fit) if manager is not None else 1


def _digest_of_parameters(trainer: pl.Trainer) -> str:
    return digest_parameters(filter(None, [trainer.strategy.model]))


def loss_of(outputs: dict[str, _Loss] | _Loss | None) -> float:
    """Return the loss in what a training step returned.

    Args:
        outputs: the loss, as a number or a tensor with one element, or a dictionary that has it as ``loss``.

    Raises:
        ValueError: the training step returned no loss.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None:
        raise ValueError("the training step returned no loss to record")
    return float(loss.item() if isinstance(loss, torch.Tensor) else loss)
