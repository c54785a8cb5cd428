"""The metrics of an incident that go to the trainer's own loggers, next to the loss."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import lightning.pytorch as pl

from checkpointless.recovery.running import manager_of

if TYPE_CHECKING:
    from checkpointless.inprocess import HPCallWrapper

__all__ = ["PREFIX", "incident_metrics", "log_incident"]

logger = logging.getLogger(__name__)

PREFIX = "checkpointless/"


def incident_metrics(call: HPCallWrapper, step: int, now_s: float) -> dict[str, float]:
    """Return what rank 0 knows of the incident that preceded this generation, without asking any other rank.

    Args:
        call: the running wrapper.
        step: the first optimizer step that was committed after the incident.
        now_s: the time now on the monotonic clock, in seconds.

    Returns:
        The metrics by name: ``generation``; where they are known, ``incidents`` (of the job so far),
        ``recovery_seconds`` from the fault until now (a hang counts from its last progress), ``steps_lost``, the
        number of committed steps that had to be made again, and ``bytes_received`` by this rank from
        living replicas.
    """
    found: dict[str, float] = {"generation": float(call.generation)}
    if call.incident is not None and call.incident.isdecimal():  # agents number incidents consecutively
        found["incidents"] = float(call.incident)
    if call.recovering_since_s is not None:
        found["recovery_seconds"] = now_s - call.recovering_since_s
    if call.high_water >= 0:
        found["steps_lost"] = float(max(0, call.high_water - (step - 1)))
    manager = manager_of(call)
    if manager is not None:
        found["bytes_received"] = float(manager.bytes_received)
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def log_incident(trainer: pl.Trainer, call: HPCallWrapper, step: int) -> None:
    """Log the incident to every logger of rank 0, in the row of the loss of ``step``.

    A logger that fails does not end the training: a warning with its traceback is logged. Nothing is communicated
    and no random number is drawn.

    Args:
        trainer: the trainer, in ``on_train_batch_end`` of ``step``.
        call: the running wrapper, in a generation that follows an incident.
        step: the first optimizer step of the generation.
    """
    if not trainer.is_global_zero:
        return
    metrics = incident_metrics(call, step, time.monotonic())
    row = trainer.fit_loop.epoch_loop._batches_that_stepped  # Lightning's axis for loss and learning rate
    for each in trainer.loggers:
        try:
            each.log_metrics(metrics, step=row)
            each.save()
        except Exception:
            logger.warning("%s did not take the metrics of an incident", type(each).__name__, exc_info=True)
