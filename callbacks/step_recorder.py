"""Records what each rank computed, so that two runs can be compared bit by bit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from checkpointless.inprocess import active_call_wrapper
from checkpointless.recovery.checksum import digest_parameters
from checkpointless.telemetry.steps import StepLog


class StepRecorder(Callback):
    """Writes loss and parameter digest of every optimizer step of this rank (``--record-steps``).

    A step that was committed while a fault was handled, before it could be recorded, is recorded when training
    resumes: its loss was kept with the rank's random streams, its parameters are in place.

    Args:
        log: where they go.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._caught_up = False
        self._recorded = 0

    @classmethod
    def from_environment(cls) -> StepRecorder | None:
        """The recorder that ``--record-steps`` asks this process for, or None."""
        log = StepLog.from_environment()
        return cls(log) if log is not None else None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the step that was resumed at, if the fault came before it was."""
        self._catch_up(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Likewise if that was the last one, after which there is no batch."""
        self._catch_up(trainer)

    def _catch_up(self, trainer: pl.Trainer) -> None:
        if self._caught_up:
            return
        self._caught_up = True
        call = active_call_wrapper()
        manager = call.checkpoint_manager if call is not None else None
        step = trainer.global_step
        if manager is None or step == 0 or (self._log.last_step() or 0) >= step:
            return
        states = manager.rng_of(step)
        if states is not None and states.loss is not None:
            self._log.record(step, states.loss, digest_parameters(filter(None, [trainer.strategy.model])))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, if the batch completed one."""
        if trainer.global_step == self._recorded:
            return
        self._recorded = trainer.global_step
        if getattr(trainer.strategy, "replaying", False) and (self._log.last_step() or 0) >= trainer.global_step:
            return
        self._log.record(
            trainer.global_step, loss_of(outputs), digest_parameters(filter(None, [trainer.strategy.model]))
        )


def loss_of(outputs: Any) -> float:
    """The loss in what a training step returned.

    Raises:
        ValueError: there is none.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if loss is None:
        raise ValueError("the training step returned no loss to record")
    return float(loss.item() if isinstance(loss, torch.Tensor) else loss)
