"""The state at the boundary of a step: every kind besides the tensors of model and optimizer, by name.

A step changes much before it is committed, and a fault leaves that half done. The state is therefore taken when a
moment after a step is reached (:class:`~checkpointless.recovery.moment.Stage`), and a recovery gives back what was
taken then. This module is the one place that says what is taken; a kind of state that is missing here is not exact
after a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from checkpointless.inprocess import UnrecoverableError
from checkpointless.serialization import state_tree
from checkpointless.strategies.boundary.epoch_metrics import put_accumulated, take_accumulated
from checkpointless.strategies.boundary.later import Later, copies_of
from checkpointless.strategies.boundary.progress import progress_of

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
    """A kind of state that Lightning's checkpoints do not have.

    Attributes:
        name: its key in the objects of a moment.
        take: returns the trainer's state of this kind, as plain data that is not changed later, or what makes it.
        put: puts that data back into a trainer.
    """

    name: str
    take: Callable[[Any], Any]
    put: Callable[[Any, Any], None]


def take_checkpoint(trainer: pl.Trainer) -> Later[dict[str, Any]]:
    """Take what Lightning itself writes into a checkpoint, without the tensors of model and optimizer.

    These are loops, schedulers, callbacks, data module, precision plugin, and what the hooks ``on_save_checkpoint``
    of callbacks and module add.

    Returns:
        What makes the checkpoint, as it would be now.

    Raises:
        UnrecoverableError: a hook fails on a checkpoint without the model's tensors.
    """
    counted: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
    }
    loops = _loops(trainer)
    kept: dict[str, Any] = {
        "callbacks": _callbacks(trainer),
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    precision = trainer.precision_plugin
    if type(precision).state_dict is not Precision.state_dict and (precision_state := precision.state_dict()):
        kept[type(precision).__qualname__] = precision_state
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and _overrides(datamodule, "state_dict"):
        kept[type(datamodule).__qualname__] = call._call_lightning_datamodule_hook(trainer, "state_dict")

    def checkpoint() -> dict[str, Any]:
        return {**counted, "state_dict": {}, "optimizer_states": [], "loops": loops(), **kept}

    if _has_save_hooks(trainer):
        made = checkpoint()
        _call_save_hooks(trainer, made)
        copied = state_tree.copy(made)
        return Later(lambda: copied)
    kept = state_tree.copy(kept)
    return Later(checkpoint)


def of_save_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Find what ``on_save_checkpoint`` of module and callbacks has put into a checkpoint.

    Args:
        trainer: the trainer.
        checkpoint: what :func:`take_checkpoint` returned, made.

    Returns:
        The values by their keys.
    """
    if not _has_save_hooks(trainer):
        return {}
    parts = (trainer.precision_plugin, getattr(trainer, "datamodule", None))
    known = _LIGHTNINGS | {type(part).__qualname__ for part in parts}
    return {key: value for key, value in checkpoint.items() if key not in known}


def _callbacks(trainer: Any) -> dict[str, Any]:
    """Return the states of the callbacks that have one, by their keys."""
    base = Callback.state_dict
    asked = [each for each in trainer.callbacks if type(each).state_dict is not base or "state_dict" in vars(each)]
    return {each.state_key: state for each in asked if (state := each.state_dict())}


def _loops(trainer: pl.Trainer) -> Callable[[], dict[str, Any] | None]:
    """Return what makes the loops' state; of None, at the beginning, Lightning makes something else once loaded."""
    fit_loop: Any = trainer.fit_loop
    begun = fit_loop.epoch_progress.current.ready > 0 or fit_loop.restarting or fit_loop.epoch_loop.restarting
    if not begun:
        return lambda: None
    state = progress_of(fit_loop).take()
    loaders = None
    if fit_loop._combined_loader is None and fit_loop._combined_loader_states_to_load:
        loaders = state_tree.copy(fit_loop._combined_loader_states_to_load)

    def make() -> dict[str, Any]:
        made = state()
        if loaders is not None:
            made["state_dict"]["combined_loader"] = loaders
        return {"fit_loop": made}

    return make


_overridden: dict[tuple[type, str], bool] = {}


def _overrides(part: Any, hook: str) -> bool:
    """Return whether a module or a data module has a ``hook`` of its own, which Lightning is slow to say."""
    known = (type(part), hook)
    if hook in vars(part):
        return bool(is_overridden(hook, part))
    if known not in _overridden:
        _overridden[known] = bool(is_overridden(hook, part))
    return _overridden[known]


def _has_save_hooks(trainer: Any) -> bool:
    base = Callback.on_save_checkpoint
    if any(type(each).on_save_checkpoint is not base for each in trainer.callbacks):
        return True
    return _overrides(trainer.lightning_module, "on_save_checkpoint")  # Lightning asks no data module


def _call_save_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owner = "a callback"
    try:
        for each in callbacks:
            if type(each).on_save_checkpoint is not Callback.on_save_checkpoint:
                owner = type(each).__name__
                each.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        module = trainer.lightning_module
        if _overrides(module, "on_save_checkpoint"):
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
        checkpoint: what :func:`take_checkpoint` returned; it stays as it is.
    """
    checkpoint = copy_to_load(checkpoint)
    if is_overridden("on_load_checkpoint", trainer.lightning_module):
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and type(datamodule).__qualname__ in checkpoint:
        call._call_lightning_datamodule_hook(trainer, "load_state_dict", checkpoint[type(datamodule).__qualname__])
    call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
    call._call_callbacks_load_state_dict(trainer, checkpoint)


def copy_to_load(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``checkpoint`` that hooks may change; Lightning itself copies the callbacks' states."""
    return {name: part if name == "callbacks" else state_tree.copy(part) for name, part in checkpoint.items()}


# --- kinds that Lightning's checkpoints lack --------------------------------------------------------------------


def _take_metrics(trainer: Any) -> Later[dict[str, Any]]:
    connector = trainer._logger_connector
    found: dict[str, dict[str, Any]] = {name: dict(getattr(connector, name)) for name in _METRICS}
    logged = [value for values in found.values() for value in values.values()]
    tensors = {id(value): value for value in logged if isinstance(value, torch.Tensor)}
    copies = copies_of(list(tensors.values()))

    def make() -> dict[str, Any]:
        made = dict(zip(tensors, copies()))
        return {name: {key: made.get(id(v), v) for key, v in values.items()} for name, values in found.items()}

    return Later(make)


def _put_metrics(trainer: Any, state: dict[str, Any]) -> None:
    for name, values in state.items():
        setattr(trainer._logger_connector, name, dict(values))


_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


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


def _take_savers(trainer: Any) -> list[dict[str, Any]]:
    return [
        {name: state_tree.copy(getattr(each, name)) for name in _SAVER if hasattr(each, name)}
        for each in trainer.callbacks
        if isinstance(each, Checkpoint)
    ]


def _put_savers(trainer: Any, states: list[dict[str, Any]]) -> None:
    savers = [each for each in trainer.callbacks if isinstance(each, Checkpoint)]
    for saver, state in zip(savers, states):
        for name, value in state.items():
            setattr(saver, name, state_tree.copy(value))


#: The kind of state whose values only the rank itself has.
ACCUMULATED = "accumulated"


def _put_stop(trainer: Any, should_stop: bool) -> None:
    trainer.should_stop = should_stop


KINDS = (
    Kind("stop", lambda trainer: bool(trainer.should_stop), _put_stop),
    Kind("metrics", _take_metrics, _put_metrics),
    Kind("savers", _take_savers, _put_savers),
    Kind(ACCUMULATED, take_accumulated, put_accumulated),
)


def take_kinds(trainer: pl.Trainer) -> Later[dict[str, Any]]:
    """Take every kind of state in :data:`KINDS` by name, but for what is accumulated over an epoch."""
    taken = [(kind.name, kind.take(trainer)) for kind in KINDS if kind.name != ACCUMULATED]
    return Later(lambda: {name: each() if isinstance(each, Later) else each for name, each in taken})


def put_kinds(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Put back what :func:`take_kinds` returned, and what was accumulated."""
    for kind in KINDS:
        kind.put(trainer, states[kind.name])
