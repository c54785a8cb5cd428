"""Plain settings of a trainer that hooks may change in the middle, and that its loops read while they run.

A script that is entered again makes the trainer that it had made at first, so they are taken at every boundary of a
step, and put back. Callbacks or schedulers that a hook adds or exchanges are no plain settings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import GradClipAlgorithmType

from checkpointless.integrations.compat.lightning import Stateful

_CLIPPING = "gradient_clip_algorithm"
#: What makes the training loader from then on; the rest is read in every step, or at the end of an epoch.
_OF_LOADERS = (
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
    "fit_loop.val_made",
)
#: What is set when the training loader is made.
_MADE = ("fit_loop.max_batches", "fit_loop._last_train_dl_reload_epoch", "fit_loop.made_at_step")
_VALIDATES = "val_check_batch"  # set with the training loader, too, and missing before
_READ = (
    "limit_train_batches",
    "limit_val_batches",
    *_OF_LOADERS,
    *_MADE,
    _CLIPPING,
    "accumulate_grad_batches",
    "gradient_clip_val",
    "log_every_n_steps",
    "fit_loop.max_epochs",
    "fit_loop.min_epochs",
    "fit_loop.epoch_loop.max_steps",
    "fit_loop.epoch_loop.min_steps",
)
_read: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_READ)


def take_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the settings as they are now, as plain data."""
    taken = dict(zip(_READ, _read(trainer)))
    algorithm = taken[_CLIPPING]
    taken[_CLIPPING] = str(getattr(algorithm, "value", algorithm)) if algorithm is not None else None
    return {**taken, _VALIDATES: vars(trainer).get(_VALIDATES)}


def put_for_loaders(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Put back what the training loader is made with, before it is made."""
    _put(trainer, state, _OF_LOADERS)


def put_settings(trainer: pl.Trainer, state: Mapping[str, Any], begins_epoch: bool = False) -> None:
    """Put the settings back.

    Args:
        trainer: the trainer.
        state: what :func:`take_settings` made.
        begins_epoch: whether an epoch begins, of which the training loader may be another one.
    """
    is_made = when_made(trainer, state, begins_epoch) is not None
    _put(
        trainer, state, (*(name for name in _READ if name not in _MADE), *((*_MADE, _VALIDATES) if is_made else ()))
    )


def when_made(trainer: pl.Trainer, state: Mapping[str, Any], begins_epoch: bool = False) -> tuple[int, int] | None:
    """Return the epoch and the step in which the training loader was made; None: it is still to be made.

    Args:
        trainer: the trainer.
        state: what :func:`take_settings` made.
        begins_epoch: whether an epoch begins, of which the training loader may be another one.
    """
    every, last = state["reload_dataloaders_every_n_epochs"], state[_MADE[1]]
    is_of_epoch = begins_epoch and every and trainer.current_epoch - last >= every
    if is_of_epoch or state[_VALIDATES] is None:  # before the loader was made
        return None
    return last, state[_MADE[2]]


def _put(trainer: pl.Trainer, state: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        path, _, last = name.rpartition(".")
        owner = operator.attrgetter(path)(trainer) if path else trainer
        value = state[name]
        if name == _CLIPPING and value is not None:
            value = GradClipAlgorithmType(value)
        if getattr(owner, last, None) != value:
            setattr(owner, last, value)


def schedulers_of(trainer: pl.Trainer) -> list[Stateful]:
    """Return the learning-rate schedulers of ``trainer``."""
    return [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
