"""The state at the boundary of a step: every kind besides the tensors of model and optimizer, by name.

A step changes much before it is committed, and a fault leaves that half done. The state is therefore taken when a
point after a step is reached (:class:`~checkpointless.state.port.SnapshotPoint`), and a recovery puts back what
was taken then. This module alone says what is taken; a kind of state that is missing is not exact after a fault.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.compat.lightning import (
    call_callbacks_load_state_dict,
    call_callbacks_on_load_checkpoint,
    call_datamodule_hook,
    call_module_hook,
)
from checkpointless.integrations.lightning.boundary.epoch_metrics import put_accumulated
from checkpointless.integrations.lightning.data.position import megatron_sampler, take_sampler
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.later import copies_of

#: What Lightning itself writes, besides the states of precision plugin and data module under their names.
_LIGHTNINGS = frozenset(
    {
        "epoch",
        "global_step",
        "pytorch-lightning_version",
        "state_dict",
        "optimizer_states",
        "loops",
        "callbacks",
        "lr_schedulers",
    }
)


class InMemoryCheckpoint(dict[str, Any]):
    """A Lightning checkpoint whose model and optimizer tensors are already in place."""


@dataclass(frozen=True)
class Kind:
    """A kind of state that Lightning's checkpoints do not have."""

    name: str
    put: Callable[[Any, Any], None]


_SAVE_HOOK = "on_save_checkpoint"


def take_state(trainer: pl.Trainer) -> Callable[[], dict[str, Any]]:
    """Take the state of a trainer as Lightning keeps it and as it does not.

    Returns:
        What makes ``checkpoint``, ``kinds`` and ``sampler``, as they would be now: what Lightning itself writes
        into a checkpoint, every kind of state in :data:`KINDS` but for what is accumulated over an epoch, and what
        NeMo's sampler counts with.

    Raises:
        UnrecoverableError: a hook fails on a checkpoint without the model's tensors.
    """
    settings = take_settings(trainer)
    checkpoint, stop, metrics = _take_checkpoint(trainer), bool(trainer.should_stop), _take_metrics(trainer)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    savers = _take_savers([each for each in callbacks if isinstance(each, Checkpoint)])
    sampler = take_sampler(megatron_sampler(trainer), getattr(trainer, "datamodule", None))
    return lambda: {
        "checkpoint": checkpoint,
        "kinds": {"stop": stop, "metrics": metrics(), "savers": savers, SETTINGS: settings},
        "sampler": sampler(),
    }


def _take_checkpoint(trainer: Any) -> dict[str, Any]:
    """Take what Lightning itself writes into a checkpoint, without the tensors of model and optimizer.

    These are loops, schedulers, callbacks, data module, precision plugin, and what the hooks ``on_save_checkpoint``
    of callbacks and module add.

    Raises:
        UnrecoverableError: a hook fails on a checkpoint without the model's tensors.
    """
    kept: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": {},
        "optimizer_states": [],
        "loops": _loops(trainer),
        "callbacks": {each.state_key: state for each in trainer.callbacks if (state := each.state_dict())},
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.strategy.lr_scheduler_configs],
    }
    precision, data = trainer.precision_plugin, getattr(trainer, "datamodule", None)
    if precision_state := precision.state_dict():
        kept[type(precision).__qualname__] = precision_state
    if data is not None and is_overridden("state_dict", data):
        kept[type(data).__qualname__] = data.state_dict()
    if _has_save_hooks(trainer):
        _call_save_hooks(trainer, kept)
    loops = kept.pop("loops")  # Lightning has just made it
    return {**state_tree.copy(kept), "loops": loops}


def of_save_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Find what ``on_save_checkpoint`` of module and callbacks has put into a checkpoint.

    Args:
        checkpoint: the ``checkpoint`` that :func:`take_state` makes.

    Returns:
        The values by their keys.
    """
    if not _has_save_hooks(trainer):
        return {}
    parts = (trainer.precision_plugin, getattr(trainer, "datamodule", None))
    known = _LIGHTNINGS | {type(part).__qualname__ for part in parts}
    return {key: value for key, value in checkpoint.items() if key not in known}


def _loops(trainer: pl.Trainer) -> dict[str, Any] | None:
    """Return the loops' state; None: the loops are at the beginning.

    Of None Lightning makes something else, once it is loaded.
    """
    fit_loop: Any = trainer.fit_loop
    begun = fit_loop.epoch_progress.current.ready > 0
    if not begun and not fit_loop.restarting and not fit_loop.epoch_loop.restarting:
        return None
    state: dict[str, Any] = fit_loop.state_dict()
    if fit_loop._combined_loader is None and fit_loop._combined_loader_states_to_load:
        state["state_dict"]["combined_loader"] = fit_loop._combined_loader_states_to_load
    saved = {name: state_tree.copy(each) for name, each in state.items() if name.endswith("state_dict")}
    return {"fit_loop": {**state, **saved}}


def _saves(callback: Callback) -> bool:
    """Return whether Lightning's call of the hook reaches code of the user's."""
    return type(callback).on_save_checkpoint is not Callback.on_save_checkpoint or _SAVE_HOOK in vars(callback)


def _has_save_hooks(trainer: Any) -> bool:
    if any(map(_saves, trainer.callbacks)):
        return True
    return bool(is_overridden(_SAVE_HOOK, trainer.lightning_module))  # Lightning asks no data module


def _call_save_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owner = "a callback"
    try:
        for each in callbacks:
            if _saves(each):
                owner = type(each).__name__
                each.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        module = trainer.lightning_module
        if is_overridden(_SAVE_HOOK, module):
            owner = type(module).__name__
            module.on_save_checkpoint(checkpoint)
    except Exception as error:
        raise UnrecoverableError(
            f"{owner}.on_save_checkpoint failed on a checkpoint without the model's tensors "
            f"({type(error).__name__}: {error}), so its state cannot be kept for a recovery from memory: "
            "let it do without checkpoint['state_dict']"
        ) from error


def load_again(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Make module, data module and callbacks load their state once more, because hooks have changed it since.

    Args:
        trainer: a trainer that has loaded ``checkpoint`` before.
        checkpoint: what :func:`take_state` made; it stays as it is.
    """
    checkpoint = copy_to_load(checkpoint)
    if is_overridden("on_load_checkpoint", trainer.lightning_module):
        call_module_hook(trainer, "on_load_checkpoint", checkpoint)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        call_datamodule_hook(trainer, "load_state_dict", checkpoint[type(datamodule).__qualname__])
    call_callbacks_on_load_checkpoint(trainer, checkpoint)
    call_callbacks_load_state_dict(trainer, checkpoint)
    _empty_those_without_state(trainer, checkpoint["callbacks"])


def _empty_those_without_state(trainer: pl.Trainer, states: Mapping[str, Any]) -> None:
    """Give callbacks that have a state now, and had an empty one, the empty one; Lightning leaves them out."""
    for each in trainer.callbacks:  # type: ignore[attr-defined]
        if each.state_key in states or not each.state_dict():
            continue
        try:
            each.load_state_dict({})
        except Exception as error:
            raise UnrecoverableError(
                f"the state of {type(each).__name__} was empty before the fault, and its load_state_dict fails on "
                f"{{}} ({type(error).__name__}: {error}): let it take what state_dict returns"
            ) from error


def copy_to_load(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``checkpoint`` that hooks may change; Lightning itself copies the callbacks' states."""
    return {name: part if name == "callbacks" else state_tree.copy(part) for name, part in checkpoint.items()}


# --- kinds that Lightning's checkpoints lack --------------------------------------------------------------------


def _take_metrics(trainer: Any) -> Callable[[], dict[str, Any]]:
    found = [values.copy() for values in _read_metrics(trainer._logger_connector)]
    tensors = {id(value): value for values in found for value in values.values() if isinstance(value, torch.Tensor)}
    copies = copies_of([*tensors.values()]) if tensors else None

    def make() -> dict[str, Any]:
        made = dict(zip(tensors, copies())) if copies is not None else {}
        return {
            name: {key: made.get(id(value), value) for key, value in values.items()}
            for name, values in zip(_METRICS, found)
        }

    return make


def _put_metrics(trainer: Any, state: dict[str, Any]) -> None:
    for name, values in state.items():
        setattr(trainer._logger_connector, name, dict(values))


_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


_read_metrics = operator.attrgetter(*_METRICS)


#: What checkpoint callbacks know and do not put into their state, or do not take from it again: which checkpoints
#: were saved last, and which were the best.
_SAVER = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "last_model_path",
    "future_last_model_path",
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "kth_best_model_path",
    "kth_value",
    "current_score",
)


def _take_savers(savers: list[Any]) -> list[dict[str, Any]]:
    return [
        {name: state_tree.copy(getattr(each, name)) for name in _SAVER if hasattr(each, name)} for each in savers
    ]


def _put_savers(trainer: Any, states: list[dict[str, Any]]) -> None:
    savers = [each for each in trainer.callbacks if isinstance(each, Checkpoint)]
    for saver, state in zip(savers, states):
        for name, value in state.items():
            setattr(saver, name, state_tree.copy(value))


#: The trainer's plain settings that hooks may change in the middle; they are put back where hooks at the start have
#: run already, since a script that is entered again makes the trainer that it had made at first.
SETTINGS = "settings"
_VALIDATES = "val_check_batch"  # missing before the training loader is made
#: What the training loader is made with, what is set when it is made, and what is read while the loops run.
OF_LOADERS = (
    "val_check_interval",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
    "fit_loop.val_made",
)
_MADE = ("fit_loop.max_batches", "fit_loop._last_train_dl_reload_epoch", "fit_loop.made_at_step")
_READ = (
    *OF_LOADERS,
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "log_every_n_steps",
    "fit_loop.max_epochs",
    "fit_loop.min_epochs",
    "fit_loop.epoch_loop.max_steps",
    "fit_loop.epoch_loop.min_steps",
)
_read: Callable[[Any], tuple[Any, ...]] = operator.attrgetter(*_READ, *_MADE)
state_tree.register_plain_type(GradClipAlgorithmType)


def take_settings(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the settings as they are now, as plain data."""
    return {**dict(zip((*_READ, *_MADE), _read(trainer))), _VALIDATES: vars(trainer).get(_VALIDATES)}


def put_settings(trainer: pl.Trainer, state: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Put back what :func:`take_settings` made: those of ``names``, or all but what the training loader sets."""
    for name in _READ if names is None else names:
        path, _, last = name.rpartition(".")
        owner = operator.attrgetter(path)(trainer) if path else trainer
        if getattr(owner, last, None) != state[name]:
            setattr(owner, last, state[name])


def put_of_epoch(trainer: pl.Trainer, state: Mapping[str, Any], begins_epoch: bool = False) -> None:
    """Put all settings back, with what the training loader has set unless an epoch begins with another one."""
    put_settings(trainer, state)
    if when_made(trainer, state, begins_epoch) is not None:
        put_settings(trainer, state, (*_MADE, _VALIDATES))


def when_made(trainer: pl.Trainer, state: Mapping[str, Any], begins_epoch: bool = False) -> tuple[int, int] | None:
    """Return the epoch and the step in which the training loader was made; None: it is still to be made."""
    every, (_, last, step) = state["reload_dataloaders_every_n_epochs"], (state[name] for name in _MADE)
    is_of_epoch = begins_epoch and every and trainer.current_epoch - last >= every
    return None if is_of_epoch or state[_VALIDATES] is None else (last, step)


#: The kind of state whose values only the rank itself has.
ACCUMULATED = "accumulated"


def _put_stop(trainer: Any, should_stop: bool) -> None:
    trainer.should_stop = should_stop


KINDS = (
    Kind("stop", _put_stop),
    Kind("metrics", _put_metrics),
    Kind("savers", _put_savers),
    Kind(ACCUMULATED, put_accumulated),
)


def put_kinds(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Put back what :func:`take_state` made of them, and what was accumulated, but not the settings."""
    for kind in KINDS:
        kind.put(trainer, states[kind.name])
