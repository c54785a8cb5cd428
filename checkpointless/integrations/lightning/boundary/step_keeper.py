"""The front end of a trainer: guards every update, captures the rest of what Lightning keeps, and puts it back.

A step changes much before it is committed, and a fault leaves that half done. The state is therefore taken when a
point after a step is reached (:class:`~checkpointless.state.port.SnapshotPoint`), and a recovery puts back what
was taken then. This module and ``epoch_metrics`` alone say what is taken: what is missing is not exact afterwards.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.integrations.compat.lightning import (
    call_callbacks_load_state_dict,
    call_callbacks_on_load_checkpoint,
    call_datamodule_hook,
    call_module_hook,
)
from checkpointless.integrations.lightning.boundary.epoch_metrics import Accumulated
from checkpointless.integrations.lightning.boundary.plain_attributes import parts_of
from checkpointless.integrations.lightning.data.loaders import DataPosition, TrainingData, megatron_sampler
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.recovery import CheckpointManager
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.journal import Captured, FrontEnd, StepBefore, StepJournal
from checkpointless.state.port import DATA, SnapshotPoint, TrainingState
from checkpointless.state.rank_local.agreement import require_equal_replicas
from checkpointless.state.rank_local.declared import declared_state
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Later, copies_of, copy_of

logger = logging.getLogger(__name__)

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
    """A copy of a Lightning checkpoint whose model and optimizer tensors are already in place."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        super().__init__(_copy_to_load(checkpoint))

    @classmethod
    def of_finished_fit(cls, trainer: pl.Trainer, objects: dict[str, Any] | None) -> InMemoryCheckpoint:
        """Return what a fit ended in that is skipped now; ``objects`` None: no rank knows its other state."""
        logger.warning(
            "this fit had ended before the fault and is not repeated; until the next fit of the block begins, the "
            "model's weights are not those that it ended with"
        )
        trainer.fit_loop.was_finished = True  # type: ignore[attr-defined]
        if objects is None:
            return cls({})
        _put_kinds(trainer, objects["kinds"])
        _put_of_epoch(trainer, objects["kinds"][SETTINGS])
        return cls(objects["checkpoint"])


_SAVE_HOOK = "on_save_checkpoint"


def take_state(trainer: pl.Trainer) -> Callable[[], dict[str, Any]]:
    """Take what Lightning and NeMo's sampler have, but tensors and an epoch's sums; return what makes it."""
    settings = {**dict(zip((*_READ, *_MADE), _read(trainer))), _VALIDATES: vars(trainer).get(_VALIDATES)}
    checkpoint, stop, metrics = _take_checkpoint(trainer), bool(trainer.should_stop), _take_metrics(trainer)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    savers = [
        {name: state_tree.copy(getattr(each, name)) for name in _SAVER if hasattr(each, name)}
        for each in callbacks
        if isinstance(each, Checkpoint)
    ]
    sampler = _take_sampler(megatron_sampler(trainer), getattr(trainer, "datamodule", None))
    return lambda: {
        "checkpoint": checkpoint,
        "kinds": {"stop": stop, "metrics": metrics(), "savers": savers, SETTINGS: settings},
        "sampler": sampler(),
    }


def _take_checkpoint(trainer: Any) -> dict[str, Any]:
    """Take what Lightning itself writes into a checkpoint, without the tensors of model and optimizer."""
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


def _of_save_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what ``on_save_checkpoint`` of module and callbacks has put into a checkpoint."""
    if not _has_save_hooks(trainer):
        return {}
    parts = (trainer.precision_plugin, getattr(trainer, "datamodule", None))
    known = _LIGHTNINGS | {type(part).__qualname__ for part in parts}
    return {key: value for key, value in checkpoint.items() if key not in known}


def _loops(trainer: pl.Trainer) -> dict[str, Any] | None:
    """Return the loops' state; None, of which Lightning makes something else: they are at the beginning."""
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


def _load_again(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Make module, data module and callbacks load their state once more, because hooks have changed it since."""
    checkpoint = _copy_to_load(checkpoint)
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


def _copy_to_load(checkpoint: dict[str, Any]) -> dict[str, Any]:
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


def _put_settings(trainer: pl.Trainer, state: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Put back what :func:`take_state` made: those of ``names``, or all but what the training loader sets."""
    for name in _READ if names is None else names:
        path, _, last = name.rpartition(".")
        owner = operator.attrgetter(path)(trainer) if path else trainer
        if getattr(owner, last, None) != state[name]:
            setattr(owner, last, state[name])


def _put_of_epoch(trainer: pl.Trainer, state: Mapping[str, Any], begins_epoch: bool = False) -> None:
    """Put all settings back, with what the training loader has set unless an epoch begins with another one."""
    _put_settings(trainer, state)
    if _when_made(trainer, state, begins_epoch) is not None:
        _put_settings(trainer, state, (*_MADE, _VALIDATES))


def _when_made(trainer: pl.Trainer, state: Mapping[str, Any], begins_epoch: bool = False) -> tuple[int, int] | None:
    """Return the epoch and the step in which the training loader was made; None: it is still to be made."""
    every, (_, last, step) = state["reload_dataloaders_every_n_epochs"], (state[name] for name in _MADE)
    is_of_epoch = begins_epoch and every and trainer.current_epoch - last >= every
    return None if is_of_epoch or state[_VALIDATES] is None else (last, step)


#: The attributes that NeMo's sampler counts with.
_SAMPLER = (
    "init_consumed_samples",
    "prev_consumed_samples",
    "if_first_step",
    "prev_global_batch_size",
    "init_global_step",
)


def _take_sampler(sampler: object, datamodule: object) -> Callable[[], dict[str, Any] | None]:
    """Take what NeMo's sampler, if there is one, and Megatron's microbatch calculator count with."""
    if sampler is None:
        return lambda: None
    counted = {name: copy_of(getattr(sampler, name)) for name in _SAMPLER if hasattr(sampler, name)}
    calculator = vars(_calculator()).copy()
    module_step = getattr(datamodule, "init_global_step", None)
    return lambda: {
        "sampler": {name: make() for name, make in counted.items()},
        "calculator": {name: value for name, value in calculator.items() if type(value) is int},
        "module_step": module_step,
    }


def _begun_at(state: dict[str, Any] | None, now: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return ``state``, taken before the data was set up, with the step that the set-up counts from."""
    if state is None or now is None:
        return state
    step = {name: value for name, value in now["sampler"].items() if name == "init_global_step"}
    return {**state, "sampler": {**state["sampler"], **step}, "module_step": now["module_step"]}


def _put_sampler(trainer: pl.Trainer, state: dict[str, Any] | None) -> None:
    sampler = megatron_sampler(trainer)
    if sampler is None or state is None:
        return
    for name, value in state["sampler"].items():
        setattr(sampler, name, state_tree.copy(value))
    for name, value in state["calculator"].items():
        setattr(_calculator(), name, value)
    if state["module_step"] is not None:
        trainer.datamodule.init_global_step = state["module_step"]  # type: ignore[attr-defined]


def _calculator() -> Any:
    from checkpointless.integrations.compat.megatron import microbatches_calculator

    return microbatches_calculator()  # NeMo's sampler brings it; Lightning alone does not


#: The kind of state whose values only the rank itself has.
ACCUMULATED = "accumulated"


def _put_kinds(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Put back what :func:`take_state` made of them, and what was accumulated, but not the settings."""
    trainer.should_stop = states["stop"]
    for name, values in states["metrics"].items():
        setattr(trainer._logger_connector, name, dict(values))
    savers = [each for each in trainer.callbacks if isinstance(each, Checkpoint)]  # type: ignore[attr-defined]
    for saver, state in zip(savers, states["savers"]):
        for name, value in state.items():
            setattr(saver, name, state_tree.copy(value))
    Accumulated.put(trainer, states[ACCUMULATED])


_LOOKED_AT = (2, 3)  # the steps in which is looked at what those before them have left; a first rate may be 0


class StepKeeper(FrontEnd):
    """Takes hold of a built trainer and guards the update; without a ``manager`` nothing is captured."""

    def __init__(
        self,
        trainer: pl.Trainer,
        call: HPCallWrapper,
        manager: CheckpointManager | None,
        position: Callable[[], DataPosition],
        steps: Steps,
    ) -> None:
        self._trainer = trainer
        self._call = call
        self._manager = manager
        self._position = position
        self.steps = steps
        self.journal = StepJournal(steps.tensors, manager or CheckpointManager(), self)
        self._computed = 0  # steps, of this fit in this generation
        steps.guard(UpdateGuard(call, self.journal if manager is not None else None, committed=self._copy))

    def _copy(self, step: int) -> None:
        if self._manager is not None and self._manager.tiers:
            self._manager.make_copies(step)

    # --- what the journal asks for --------------------------------------------------------------------------------

    @override
    def ready(self, step: int) -> Captured:
        self._computed += 1
        if self._call.generation == 0 and self._computed in _LOOKED_AT:
            reason = self.journal.changed()
            if reason:  # a fault after that would find ranks whose state is that of no step
                raise UnrecoverableError(reason)
            require_equal_replicas(self.journal.state, step - 1)
        accumulated = Accumulated(self._trainer)
        succeeded, outcome = self.steps.outcome(accumulated)
        loss = self._call.steps.loss
        repeated_steps.compute(step, loss)
        return Captured(lambda: {"outcome": outcome()}, accumulated.own(), loss, not succeeded)

    @override
    def committed(
        self, step: int, ready: Captured, before: StepBefore | None
    ) -> Callable[[], dict[str, Any]] | None:
        if before is None:
            return None
        base, taken = before
        begun = take_state(self._trainer)()["sampler"] if base is SnapshotPoint.LOADED else None
        if base is SnapshotPoint.COMMITTED:
            taken()  # otherwise each step would hold all those before it

        def objects() -> dict[str, Any]:
            made = {**taken(), **ready.objects(), "base": int(base)}
            if base is SnapshotPoint.LOADED:
                made["sampler"] = _begun_at(made["sampler"], begun)
            return made

        return objects

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        accumulated, position, state = Accumulated(self._trainer), self._position(), take_state(self._trainer)

        def objects() -> dict[str, Any]:
            made = state()
            return {
                "checkpoint": made["checkpoint"],
                "kinds": {**made["kinds"], ACCUMULATED: accumulated()},
                "sampler": made["sampler"],
                "data": tuple(position),
                "outcome": None,
                "base": None,
            }

        return Captured(objects, accumulated.own())

    @override
    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        checkpoint = objects["checkpoint"]
        loops = checkpoint["loops"] or {}
        loaders = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
        kept = {part.kept_state for part in parts_of(self._trainer)}
        parts: dict[str, Any] = {
            f"the state of {key}": state for key, state in checkpoint["callbacks"].items() if key not in kept
        }
        if loaders:
            parts[f"{DATA} (loaders)"] = _without_worker_seeds(loaders)
        datamodule = getattr(self._trainer, "datamodule", None)
        if type(datamodule).__qualname__ in checkpoint:
            parts[f"{DATA} ({type(datamodule).__qualname__})"] = checkpoint[type(datamodule).__qualname__]
        for key, value in _of_save_hooks(self._trainer, checkpoint).items():
            parts[f"what on_save_checkpoint puts into checkpoint[{key!r}]"] = value
        return parts


def _without_worker_seeds(state: object) -> object:
    """Leave out of a loader's state the seeds that torchdata's iterators draw for workers: ranks differ in them."""
    if isinstance(state, list):
        return [_without_worker_seeds(each) for each in state]
    if not isinstance(state, dict):
        return state
    snapshot = state.get("_snapshot")
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("_main_snapshot"), dict):
        return state
    workers = (snapshot.get("_worker_snapshots") or {}).values()
    if any(each.get("fetcher_state") is not None for each in workers):  # an iterable dataset's
        return state
    main = {name: value for name, value in snapshot["_main_snapshot"].items() if name != "_base_seed"}
    return {**state, "_snapshot": {**snapshot, "_main_snapshot": main}}


# --- After a fault: what memory gave is put back, part by part, until the loops go on -----------------------------


class Restoration:
    """What memory gave one trainer besides its tensors; ``is_pending``: a part of it is still to be put back."""

    def __init__(
        self,
        objects: dict[str, Any],
        trainer: pl.Trainer,
        manager: CheckpointManager,
        keeper: StepKeeper,
        data: TrainingData,
    ) -> None:
        assert manager.resumed_at is not None
        self._step, self.stage = manager.resumed_at
        replays = self.stage is SnapshotPoint.COMMITTED
        #: The step and the point of which the state is: where a step is replayed, those from before it.
        self._base = (self._step - 1, SnapshotPoint(objects["base"])) if replays else manager.resumed_at
        self.begins_epoch = self._base[1] is SnapshotPoint.TURNED
        self._is_in_training = self._base[1] is not SnapshotPoint.LOADED  # hooks at its start had run
        self.is_pending = True
        self._objects = objects
        self._settings = objects["kinds"][SETTINGS]
        self._trainer = trainer
        self._manager = manager
        self._keeper = keeper
        self._data = data
        #: The streams and attributes that making a loader has left, in an epoch that begins.
        self._made_loader: tuple[RngStates, dict[str, bytes]] | None = None

    # --- before the loops begin ---------------------------------------------------------------------------------

    def put_sampler(self) -> None:
        """Put NeMo's sampler back, so that a loader is made as it was at the start."""
        if self.is_pending:
            _put_sampler(self._trainer, self._objects["sampler"])

    def position(self) -> DataPosition | None:
        """Return where the next training loader begins; None: at the beginning."""
        if not self.is_pending:
            return None
        position = DataPosition(*self._objects["data"])
        if not self.begins_epoch:
            return position
        is_same = not self._settings["reload_dataloaders_every_n_epochs"]  # loader, whose length is known
        return position._replace(within=False, length_at_start=position.length_at_start if is_same else None)

    def resume(self) -> None:
        """Put back the part of the state that Lightning does not load, and set where the loops resume."""
        manager, objects = self._manager, self._objects
        kept = objects["kinds"][ACCUMULATED]
        if manager.was_filled:
            of_step = objects["outcome"]["accumulated"] if self.stage is SnapshotPoint.COMMITTED else kept
            Accumulated.warn_if_lost(of_step, manager.own.kept_at(self._step, self.stage))
        self._objects = {**objects, "kinds": {**objects["kinds"], ACCUMULATED: self._own_of(kept, *self._base)}}
        _put_kinds(self._trainer, self._objects["kinds"])
        self.put_sampler()
        if self._is_in_training:
            _put_settings(self._trainer, self._settings, OF_LOADERS)
        if self.stage is SnapshotPoint.LOADED:
            self.is_pending, self._objects = False, {}
            manager.restore_streams()
            return
        # The beginning of the loops draws what it drew then, and makes loaders by the attributes that there were.
        manager.own.streams.restore(*self._base)
        self._trainer.fit_loop.resumption = self  # type: ignore[attr-defined]

    def _own_of(self, kept: dict[str, Any], step: int, stage: SnapshotPoint) -> dict[str, Any]:
        """Return what this rank itself accumulated over the epoch, although ``kept`` may come from a peer."""
        own = self._manager.own.kept_at(step, stage)
        return Accumulated.with_own(kept, own) if own is not None or self._manager.was_filled else kept

    # --- what the loops call ------------------------------------------------------------------------------------

    def when_made(self) -> tuple[int, int] | None:
        """Return the epoch and the step in which the training loader was made; None: it is still to be made."""
        return _when_made(self._trainer, self._settings, self.begins_epoch)

    def make_loader(self, make: Callable[[], None]) -> None:
        """Make the loader of the epoch that begins with ``make``, as it would have been without the fault."""
        self._manager.own.streams.restore(*self._base)
        make()
        self._made_loader = RngStates.capture(), declared_state.take()

    def go_on(self) -> None:
        """Put the state back again, after the loops have begun with hooks and iterators that changed it."""
        trainer, manager, objects = self._trainer, self._manager, self._objects
        position = DataPosition(*objects["data"])
        if self.begins_epoch:
            self._data.begin_epoch(position)
        elif self._is_in_training:  # else Lightning knows where the data stood
            self._data.resume_at(position, trainer.fit_loop)
        _load_again(trainer, objects["checkpoint"])
        _put_kinds(trainer, objects["kinds"])
        if self._is_in_training:
            _put_of_epoch(trainer, self._settings, self.begins_epoch)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        manager.saves.forget_lost(callbacks)
        self.put_sampler()
        self.is_pending = False
        self._keeper.journal.put_back()
        if self.stage is not SnapshotPoint.COMMITTED:
            self._objects = {}  # nothing more of it is needed
            manager.restore_streams()
        elif self._is_in_training and not manager.own.streams.restore(*self._base):  # for what led to the step
            logger.warning("random numbers drawn after step %d are drawn again", self._base[0])
        if self._made_loader is not None:
            streams, attributes = self._made_loader
            streams.restore()
            declared_state.put(attributes)

    def do_again(self, run: Callable[[], None]) -> None:
        """Let Lightning, in ``run``, replay the last committed step without computing it."""
        outcome = StepOutcome(**self._objects["outcome"])
        self._objects = {}
        states = self._manager.own.streams.newest(self._step)
        output = (outcome.state or {}).get("output", {})
        if self._manager.was_filled and set(output) - {"loss"}:
            logger.warning(
                "on_train_batch_end gets what a peer's training_step returned for step %d beside the loss: this "
                "rank's own is lost with its process",
                self._step,
            )
        replayed = _with_own_loss(outcome, states.loss if states is not None else None)
        steps = self._keeper.steps
        steps.replayed, steps.put_back = replayed, self._put_back_what_was_before
        steps.done = self._manager.restore_streams
        try:
            run()
        finally:
            steps.replayed = None

    def _put_back_what_was_before(self) -> None:
        outcome = self._keeper.steps.replayed
        assert outcome is not None
        accumulated = cast(dict[str, Any], outcome.accumulated)  # known of every step that was computed
        if outcome.state is not None:
            _load_again(self._trainer, outcome.state["checkpoint"])
            _put_kinds(self._trainer, {**outcome.state["kinds"], ACCUMULATED: accumulated})
            _put_of_epoch(self._trainer, outcome.state["kinds"][SETTINGS])
        Accumulated.put(self._trainer, self._own_of(accumulated, self._step, self.stage))


# --- How a framework makes the steps of a trainer -----------------------------------------------------------------
#
# A rank that was interrupted after the update of a step has committed the step. What Lightning and the callbacks do
# at the end of the batch is still to come, and some ranks may have done it in part. All ranks go back to the state
# before the step and let Lightning run through it again, with the outcome in place of forward, backward and update.


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a training step."""

    reduced: object
    has_outputs: bool  # whether this pipeline stage had losses to reduce
    fetched: int  # batches that the step took from the loader
    succeeded: bool  # whether the update was made (with fp16, not if a gradient overflowed)
    grad_norm: float | None
    num_zeros: float | None
    #: What was logged and accumulated in this epoch up to the update, which is known of steps that were computed.
    accumulated: dict[str, Any] | None = None
    #: What hooks had changed by then, as a framework's steps keep it; None: the hooks are called again.
    state: dict[str, Any] | None = None


def _with_own_loss(outcome: StepOutcome, loss: float | None) -> StepOutcome:
    """Return a peer's ``outcome`` with this rank's loss, if it was kept: a reduction need not be over all ranks."""
    reduced = outcome.reduced
    if loss is None:
        return outcome
    if isinstance(reduced, torch.Tensor) and not reduced.dim():
        return replace(outcome, reduced=torch.full_like(reduced, loss))
    output = (outcome.state or {}).get("output", {})
    if isinstance(output.get("loss"), torch.Tensor):
        output = {**output, "loss": torch.full_like(output["loss"], loss)}
        return replace(outcome, state={**(outcome.state or {}), "output": output})
    return outcome


class Steps(Protocol):
    """How a framework makes the training steps of one trainer."""

    replayed: StepOutcome | None  # the outcome of the committed step that is replayed; None: a step is computed
    put_back: Callable[[], None]  # what it had left when its gradients were final
    done: Callable[[], None]  # puts back the streams from after the update

    @property
    def tensors(self) -> TrainingState:
        """The tensors of model and optimizer."""

    def guard(self, guard: UpdateGuard) -> None:
        """Guard every update from now on."""

    def outcome(self, accumulated: Later[dict[str, Any]]) -> tuple[bool, Callable[[], dict[str, Any]]]:
        """Take the outcome of the step whose gradients are final: whether it updates, and what makes plain data."""

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step with ``make``, as the framework does, or replay it."""
