"""Bring Lightning's loops of an interrupted trainer to a step boundary.

A fault may come anywhere in a batch: before its optimizer step, when the loop has counted a batch that did not
happen, or after it, when the loop has not yet counted a step that did. What is restored is the state exactly after
the last committed step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepBoundary:
    """What the loop looked like when the step in the making began.

    Attributes:
        step: the optimizer step that then began, from 1.
        batches: how many batches were completed, of the whole run and of the epoch.
        batches_that_stepped: Lightning's counter for loggers.
        schedulers: states of the learning-rate schedulers.
        learning_rates: of every param group of every optimizer.
    """

    step: int
    batches: tuple[int, int]
    batches_that_stepped: int
    schedulers: tuple[Mapping[str, Any], ...]
    learning_rates: tuple[tuple[Any, ...], ...]

    @classmethod
    def take(cls, trainer: Any, step: int) -> StepBoundary:
        """Take note, at the start of a batch."""
        epoch_loop = trainer.fit_loop.epoch_loop
        progress = epoch_loop.batch_progress
        return cls(
            step,
            (progress.total.completed, progress.current.completed),
            epoch_loop._batches_that_stepped,
            tuple(dict(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs),
            tuple(
                tuple(group.get("lr") for group in optimizer.param_groups)
                for optimizer in trainer.strategy.optimizers
            ),
        )


def settle(trainer: Any, boundary: StepBoundary | None, committed: int) -> None:
    """Bring the loops and schedulers of ``trainer`` to the state after step ``committed``.

    May be called again with ``committed`` one larger, when a held update was applied.

    Args:
        trainer: the interrupted trainer; its loops are changed in place.
        boundary: taken when the newest step began (None: none has begun since the state was whole).
        committed: the last optimizer step that this rank applied.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    progress = epoch_loop.batch_progress
    happened = 1 if boundary is not None and boundary.step == committed else 0
    counts = boundary.batches if boundary is not None else (progress.total.completed, progress.current.completed)
    for tracker, count in zip((progress.total, progress.current), counts):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = count + happened
    progress.is_last_batch = False
    _forget_validation(epoch_loop.val_loop)
    _settle_optimizer(epoch_loop.automatic_optimization.optim_progress, committed)
    if boundary is not None and happened:
        epoch_loop._batches_that_stepped = boundary.batches_that_stepped + 1
        _step_schedulers(trainer, boundary)


def _forget_validation(val_loop: Any) -> None:
    """Have a validation that is due at the step boundary run again, whole, on every rank alike."""
    val_loop._has_run = False
    for tracker in (val_loop.batch_progress.total, val_loop.batch_progress.current):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = 0
    val_loop.batch_progress.is_last_batch = False


def _settle_optimizer(progress: Any, committed: int) -> None:
    missing = committed - progress.optimizer.step.total.completed
    for tracker in (progress.optimizer.step.total, progress.optimizer.step.current):
        tracker.completed += missing
        tracker.ready = tracker.completed
    for tracker in (progress.optimizer.zero_grad.total, progress.optimizer.zero_grad.current):
        tracker.started = tracker.completed = tracker.ready = max(tracker.completed, 0)


def _step_schedulers(trainer: Any, boundary: StepBoundary) -> None:
    """Make the schedulers' step that belongs to the committed step, afresh: an interruption may have torn it."""
    for optimizer, rates in zip(trainer.strategy.optimizers, boundary.learning_rates):
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = rate
    for config, state in zip(trainer.lr_scheduler_configs, boundary.schedulers):
        config.scheduler.load_state_dict(dict(state))
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    for tracker in (epoch_loop.scheduler_progress.total, epoch_loop.scheduler_progress.current):
        tracker.ready = tracker.completed
