"""What every Lightning strategy with recovery has in common; it stands before a framework's own in method order."""

from __future__ import annotations

import csv
import functools
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import MARK, asked_for
from checkpointless.callbacks.trainer_parts import job_step
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.inprocess.wrap import not_exact
from checkpointless.integrations.compat.lightning import Stateful, set_sampler_epoch
from checkpointless.integrations.lightning.boundary.loops import make_resumable
from checkpointless.integrations.lightning.boundary.plain_attributes import parts_of
from checkpointless.integrations.lightning.boundary.step_keeper import (
    InMemoryCheckpoint,
    Restoration,
    StepKeeper,
    StepOutcome,
    Steps,
)
from checkpointless.integrations.lightning.checkpoints.connector import CheckpointlessCompatibleConnector
from checkpointless.integrations.lightning.data.loaders import (
    DataPosition,
    TrainingData,
    ValidationData,
    megatron_sampler,
)
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.launcher.protocol.board import Facts
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.recovery import CheckpointManager, PEFTCheckpointManager
from checkpointless.recovery.decide import Verdict
from checkpointless.recovery.guard import vote
from checkpointless.recovery.manager import manager_of
from checkpointless.state.journal import StepJournal
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.declared import declared_state
from checkpointless.state.rng import RngStates, register_rng_source
from checkpointless.transfer.exchange import all_gather_json

_UNTRUE = (
    "You're resuming from a checkpoint that ended before the epoch ended"  # the position in the data is restored
)
logger = logging.getLogger(__name__)


class RecoverableStrategy(ParallelStrategy):
    """A strategy that finds the running wrapper and lets a :class:`_RecoverableFit` keep what a fit changes."""

    trainer: pl.Trainer  # since setup()
    awaits_adapters = False  # whether NeMo has yet to add the adapters of a PEFT run, and there is no optimizer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._call = active_call_wrapper()
        self._rebuild_began_s = 0.0
        self._fit: _RecoverableFit | None = None  # the newest one that was set up inside a block
        self._data = TrainingData()
        self._worker_seed = _WorkerSeed()
        if self._call is None:
            logger.warning("no HPWrapper is active: this run has no in-process recovery")
        elif self._call.generation > 0:
            warnings.filterwarnings("ignore", message=_UNTRUE)

    # --- what the recovery asks for -------------------------------------------------------------------------------

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        """The manager that keeps this rank's state over restarts; None if recovery is switched off."""
        return self._fit.manager if self._fit is not None else None

    @property
    def replaying(self) -> bool:
        """Whether a committed step is replayed for what follows its update."""
        return self._fit is not None and self._fit.replayed is not None

    def get_wrapper(self) -> HPCallWrapper | None:
        """Return the wrapper given to the trainer (``trainer.wrapper``), or the one whose block this runs in."""
        given: HPCallWrapper | None = getattr(getattr(self, "trainer", None), "wrapper", None)
        return given if given is not None else self._call

    def journal(self) -> StepJournal:
        """Return the journal of the running trainer, whose strategy is set up."""
        journal = self._fit.journal if self._fit is not None else None
        if journal is None:
            raise RuntimeError("the strategy has no state before setup()")
        return journal

    def rebuilt(self) -> None:
        """Record that everything is rebuilt and waits for its state."""
        if (call := self._call) is not None:
            took_s = time.monotonic() - self._rebuild_began_s
            EventLog.here().emit(
                EventName.REBUILD, "end", generation=call.generation, incident=call.incident, seconds=took_s
            )

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        """Note that the tensors are in place, and keep the rest of the state, of which Lightning loads a part."""
        assert self._fit is not None
        self._fit.restored_from_memory(objects)

    def restored(self) -> None:
        """Prepare to train with the state, which is whole: from memory, from storage, or that of a new job."""
        if self._fit is not None:
            self._fit.restored()

    # --- how a fit is set up --------------------------------------------------------------------------------------

    def _build_groups(self, build: Callable[[], None]) -> None:
        """Build the process groups of this generation with ``build``; when they are there, the rebuild begins."""
        call = self._call
        if call is None:
            build()
            return
        call.steps.entered()
        call.enter_phase("init", call.high_water)
        with EventLog.here().span(EventName.INIT, generation=call.generation, incident=call.incident):
            build()
        call.beat()
        self._rebuild_began_s = time.monotonic()
        EventLog.here().emit(EventName.REBUILD, "begin", generation=call.generation, incident=call.incident)

    def _resume_loggers(self) -> None:
        call, module = self._call, self.lightning_module
        if call is None or call.generation == 0 or module is None:
            return
        manager = manager_of(call)
        _resume_loggers(module.trainer, call.facts, (manager.fits.number if manager is not None else 0) + 1)

    def _begin_fit(
        self,
        trainer: pl.Trainer,
        make_saves: Callable[[], object],
        peft: bool = False,
        announces: bool = False,
    ) -> _RecoverableFit:
        """Begin a fit of a set-up model in a block; ``announces``: Lightning fetches, so announce ``data``."""
        call = self._call
        assert call is not None
        call.blocks.begin_training()
        call.beat()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        _refuse_unfit(callbacks)
        callback = _complete(callbacks)
        for part in (call.wrapper.abort, call.wrapper.finalize):
            register = getattr(part, "register_attributes", None)
            if register is not None:
                register(trainer)
        manager = _begin_manager(call, callback, peft, make_saves)
        self._fit = _RecoverableFit(trainer, call, manager, self._data, self._worker_seed, announces)
        make_resumable(trainer, self._fit)
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector.adopt(trainer._checkpoint_connector)
        return self._fit

    # --- what Lightning calls -------------------------------------------------------------------------------------

    def _data_rank(self) -> int:
        raise NotImplementedError

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Distribute the samples to the ranks, and make them and what workers draw independent of faults."""
        if self._fit is not None:
            self._fit.loader_is_due()
        loader: Any = super().process_dataloader(dataloader)
        if self._fit is not None:
            self._fit.loader_is_made(loader)
        if self._worker_seed.value is not None and self._fit is not None:
            _repeat_worker_draws(loader, self._worker_seed.value, self.trainer, self._data_rank())
        return loader

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one optimizer step, or replay what belongs to one without its update."""
        if self._fit is None:
            return super().optimizer_step(*args, **kwargs)
        return self._fit.update(partial(super().optimizer_step, *args, **kwargs))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, unless recovery has put it in place already."""
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], **options: Any) -> None:
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_optimizer_state_dict(checkpoint, **options)

    @property
    def is_left(self) -> bool:
        """Whether the trainer is left for a fault, so that other ranks may not come to where this one waits."""
        trainer: Any = getattr(self, "trainer", None)
        return self._call is not None and trainer is not None and bool(trainer.interrupted)

    def _finish_fit(self) -> bool:
        """End the fit that is torn down; return False if a fault ended it, so that abort and finalizer clean up."""
        trainer: Any = getattr(self, "trainer", None)
        if self.is_left or (trainer is None and self._call is not None):  # the fault came before setup()
            return False
        if self._fit is not None and trainer.state.fn == TrainerFn.FITTING:
            self._fit.finish()
        return True


# --- Callbacks that a fit in the block needs ----------------------------------------------------------------------


def _complete(present: list[Any]) -> CheckpointlessCallback:
    """Put the environment's callbacks last, in place, and add what is missing; return ours with the settings."""
    bound = [weakref.ref(each) for each in present]
    register_cleanup("callbacks", lambda: _unbind([callback for each in bound if (callback := each())]))
    scripts = [each for each in present if not hasattr(each, MARK)]
    for callback in scripts:
        if isinstance(callback, HPFaultInjectionCallback):
            callback.listen()  # it may have been made before the block was entered
    if not any(isinstance(callback, CheckpointlessCallback) for callback in scripts):
        scripts.append(CheckpointlessCallback())
    has_recorder = any(isinstance(callback, StepRecorder) for callback in scripts)
    # A script may give one list to several trainers.
    newest = {type(callback): callback for callback in present if hasattr(callback, MARK)}
    for callback in newest.values() or asked_for():
        if not (has_recorder and isinstance(callback, StepRecorder)):
            scripts.append(callback)
    present[:] = scripts
    return next(callback for callback in present if isinstance(callback, CheckpointlessCallback))


def _unbind(callbacks: Iterable[Any]) -> None:
    """Drop what Lightning binds callbacks to, which would keep the module of the generation that is over."""
    for each in callbacks:
        for name in ("log", "log_dict"):
            vars(each).pop(name, None)


# --- Lightning's own callbacks that no recovery can go on with, each with what to do instead

_AVERAGES = (
    "{} exchanges weights in hooks, from copies that a replaced rank does not have: let the optimizer's "
    "register_step_post_hook update a torch.optim.swa_utils.AveragedModel that is a part of the module"
)
_TUNES = "{} trains before the fit, again after each fault: tune in another job"

#: By the names of the classes, of which older versions of Lightning lack some.
_UNFIT = {
    "LearningRateFinder": _TUNES,
    "BatchSizeFinder": _TUNES,
    "BaseFinetuning": (
        "{} gives the optimizer more parameters while it trains, which a replaced rank does not have: give it all "
        "of them in configure_optimizers"
    ),
    "StochasticWeightAveraging": _AVERAGES,
    "WeightAveraging": _AVERAGES,
    "ModelPruning": (
        "{} gives the model masks while it trains, which a replaced rank does not have: call torch.nn.utils.prune "
        "in configure_model"
    ),
    "SpikeDetection": (
        "{} ends training with an exception, which is recovered from: compare the loss in a hook, and set "
        "trainer.should_stop"
    ),
}


def _refuse_unfit(callbacks: Iterable[object]) -> None:
    """Raise, with what to do instead, if a training with ``callbacks`` cannot be recovered exactly."""
    kinds = [(getattr(stock, name), reason) for name, reason in _UNFIT.items() if hasattr(stock, name)]
    for each in callbacks:
        for kind, reason in kinds:
            if isinstance(each, kind):
                raise UnrecoverableError(reason.format(type(each).__name__))


# --- One fit of a trainer: what recovery keeps of it, and how it resumes -----------------------------------------

_BEGAN = "where the data began"  # the fact: the step and the samples that the fit began at
_SEVERAL = (
    "checkpointless cannot bring {} training dataloaders back to where each of them stood: let train_dataloader "
    "return one DataLoader, over one torch.utils.data.Dataset with the items of all of them (ConcatDataset or "
    "StackDataset, for example)"
)


def _begin_manager(
    call: HPCallWrapper, callback: CheckpointlessCallback, peft: bool, make_saves: Callable[[], object]
) -> CheckpointManager | None:
    """Begin a fit with the manager of the block, which may have to be made; None: memory is switched off."""
    call.restart_in_process = callback.enable_inprocess
    if not callback.enable_checkpointless:
        return None
    manager = manager_of(call)
    if manager is None:
        call.checkpoint_manager = manager = PEFTCheckpointManager() if peft else CheckpointManager()
    if peft and manager.tiers:
        raise UnrecoverableError("fine-tuning with adapters keeps no copies in tiers: leave out tiers")
    if callback.enable_checksum:
        manager.enable_checksum = True
    manager.fits.begin(manager.parameter_update_lock.committed)
    saves = make_saves()
    if type(manager.saves) is not type(saves):  # the fit before may have had another kind of strategy
        manager.saves = saves
    return manager


class _RecoverableFit:
    """One fit of a trainer, which resumes after a fault. The loops report their points to it."""

    def __init__(
        self,
        trainer: pl.Trainer,
        call: HPCallWrapper,
        manager: CheckpointManager | None,
        data: TrainingData,
        worker_seed: _WorkerSeed,
        announces_data: bool,
    ) -> None:
        self.manager = manager
        self._announces_data = announces_data
        self._trainer = trainer
        self._call = call
        self._data = data
        self.epoch_begins = data.begin_epoch
        self._worker_seed = worker_seed
        self._stored = _StoredPosition(trainer, call.facts)
        self.keeper: StepKeeper | None = None  # a PEFT run has neither adapters nor an optimizer at first
        self._restoration: Restoration | None = None
        self._restored_without_adapters = False
        self._validation_data: ValidationData | None = None
        if manager is not None:
            repeated_steps.begin_entry(call.is_first)
            self._validation_data = ValidationData(trainer)
            old, saves = weakref.ref(trainer), manager.saves
            declared_state.begin(lambda: parts_of(old()))
            register_cleanup("saves", lambda: saves.let_go(old()))

    # --- what it holds ------------------------------------------------------------------------------------------

    def take_hold(self, steps: Steps) -> None:
        self.keeper = StepKeeper(self._trainer, self._call, self.manager, self.position, steps)

    def position(self) -> DataPosition:
        return self._data.position(self._trainer.fit_loop)

    @property
    def journal(self) -> StepJournal | None:
        """The journal of the fit; None before :meth:`take_hold`."""
        return self.keeper.journal if self.keeper is not None else None

    @property
    def is_under_way(self) -> bool:
        return self.manager is not None and self.keeper is not None and self.keeper.journal.newest is not None

    @property
    def replayed(self) -> StepOutcome | None:
        """The outcome of the committed step that is replayed; None: a step is computed."""
        return self.keeper.steps.replayed if self.keeper is not None else None

    # --- what the loops report ----------------------------------------------------------------------------------

    def reached(self, stage: SnapshotPoint) -> None:
        """Take the state of the point that the loops have reached: ``stage`` after the newest step."""
        if self.manager is None or self.keeper is None:
            return
        self.keeper.journal.reached(job_step(self._trainer), stage)

    def before_fetch(self) -> None:
        """Announce that a batch is asked for, unless what fetches batches in the step does so itself."""
        if self._announces_data and self.replayed is None:
            self._call.enter_phase("data", job_step(self._trainer) + 1)

    def data_is_set_up(self, loaders: Sequence[Any]) -> None:
        """Refuse several training loaders, which could not be brought back to where they stood."""
        if self.manager is not None and len(loaders) > 1:
            raise UnrecoverableError(_SEVERAL.format(len(loaders)))
        self._data.set_up()

    # --- when the state is whole --------------------------------------------------------------------------------

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        assert self.manager is not None
        assert self.keeper is not None
        self._restoration = Restoration(objects, self._trainer, self.manager, self.keeper, self._data)

    @property
    def _is_resuming(self) -> bool:
        return self._restoration is not None and self._restoration.is_pending

    def restored(self) -> None:
        call, manager = self._call, self.manager
        if manager is None:
            return
        _keep_loggers(self._trainer, call.facts, manager.fits.number)
        resumed_at = manager.resumed_at if self._is_resuming else None
        if call.generation > 0:
            manager.saves.agree(resumed_at, self._trainer.strategy)
        manager.saves.watch(self._trainer.strategy)
        if manager.verdict is Verdict.SKIP:
            return
        step = resumed_at[0] if resumed_at is not None else job_step(self._trainer)
        self._worker_seed.agree(manager.own.streams.newest(step))
        if self._restoration is not None and self._is_resuming:
            self._restoration.resume()
        elif call.generation > 0 and manager.verdict is not Verdict.START:  # no rank holds the state of the fault
            self._stored.resume(step)
        else:
            self._stored.begin(step)
        if self.keeper is None:
            self._restored_without_adapters = True
        else:
            if not self._is_resuming:
                self.keeper.journal.begin(job_step(self._trainer), SnapshotPoint.LOADED)
            manager.attach(self.keeper.journal, step)
        call.steps.begin_data(_samples_per_step(self._trainer))

    def adapters_added(self, params_to_save: Iterable[str]) -> None:
        """Note that the adapters are in place with their values, unless memory is about to give them the values."""
        manager, keeper = self.manager, self.keeper
        if manager is None or keeper is None:
            return
        if isinstance(manager, PEFTCheckpointManager):
            manager.params_to_save = set(params_to_save)
        if self._restored_without_adapters:
            self._restored_without_adapters = False
            keeper.journal.begin(job_step(self._trainer), SnapshotPoint.CHECKED)
            vote()  # an attached rank can be recovered from: by then every rank's streams are on its board
            manager.attach(keeper.journal, job_step(self._trainer))

    # --- while it is run ----------------------------------------------------------------------------------------

    def loader_is_due(self) -> None:
        if self._restoration is not None and self._trainer.training:
            self._restoration.put_sampler()

    def loader_is_made(self, loader: Iterable[object]) -> None:
        """Follow a loader that has just been made, and bring it to where the data stood before the fault."""
        if self.manager is not None and self._trainer.training:
            position = self._restoration.position() if self._restoration is not None else None
            if position is not None:  # Lightning tells the sampler too late: workers ask for their items at once
                epochs: Any = self._trainer.fit_loop.epoch_progress
                set_sampler_epoch(loader, epochs.current.processed)
            self._data.made(loader, self.manager.own.streams, position, self._announces_data)
            self._stored.made(loader)
        elif self._validation_data is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._validation_data.made(loader)

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step, or replay one, in which nothing is updated."""
        return self.keeper.steps.update(make) if self.keeper is not None else make()

    def save(self, path: str, make: Callable[[], None], **background: Any) -> None:
        began_s, call = time.monotonic(), active_call_wrapper()
        if self.manager is None or self.keeper is None or not self.is_under_way:
            make()
        else:
            self.manager.saves.save(path, self.keeper.journal.newest, make, **background)
        if call is not None and self._trainer.is_global_zero:
            took_s = time.monotonic() - began_s
            EventLog.here().emit(EventName.SAVED, "point", generation=call.generation, path=path, seconds=took_s)

    def finish(self) -> None:
        """End the fit, if it is under way. Collective."""
        if self.manager is not None and self.keeper is not None and self.is_under_way:
            vote()  # the last hooks have run on every rank: no rank goes back into this fit
            self.manager.fits.finish(self.keeper.journal.objects())
            self.manager.copies.finish()


# --- Position in the data after a checkpoint on storage -----------------------------------------------------------


def _samples_per_step(trainer: pl.Trainer) -> int | None:
    """Return how many samples the whole job takes per step; None if there is no Megatron sampler, or it varies."""
    sampler = megatron_sampler(trainer)
    size = getattr(sampler, "global_batch_size", None)
    return size if isinstance(size, int) and not getattr(sampler, "rampup_batch_size", None) else None


class _StoredPosition:
    """The position in the data of a fit that resumes from storage, where no data module or loader has kept it."""

    def __init__(self, trainer: pl.Trainer, facts: Facts) -> None:
        self._trainer, self._facts = trainer, facts
        self._step = 0  # the step that the fit resumes after, if the position in its epoch is not known yet

    def begin(self, step: int) -> None:
        """Note where the data of a fit begin that begins after ``step``, with what the script has loaded."""
        sampler = megatron_sampler(self._trainer)
        self._facts.keep(_BEGAN, [step, int(sampler.init_consumed_samples) if sampler is not None else None])

    def resume(self, step: int) -> None:
        """Bring NeMo's sampler to where it stood after ``step``, unless the data module has done that."""
        trainer: Any = self._trainer
        sampler = megatron_sampler(trainer)
        began_step, began_samples = self._facts.get(_BEGAN, [step, None])
        if step <= began_step:  # the training starts over, or has an older checkpoint
            self.begin(step)
            return
        if sampler is None:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self._step = step if progress.current.ready and not progress.is_last_batch else 0
            return
        if sampler.init_consumed_samples != began_samples:
            return  # the data module has a state_dict
        size = _samples_per_step(trainer)
        if size is None or trainer.current_epoch:
            self._begins_anew(step, "the data module has no state_dict")
            return
        sampler.init_consumed_samples = sampler.prev_consumed_samples = began_samples + (step - began_step) * size
        sampler.if_first_step = 1  # as NeMo's data modules set it
        sampler.init_global_step = trainer.global_step

    def made(self, loader: object) -> None:
        """Look at the training loader that was made for the epoch in which the fit resumes."""
        step, self._step = self._step, 0
        if step and not isinstance(loader, Stateful):
            self._begins_anew(step, "the loader has no state_dict")

    def _begins_anew(self, step: int, why: str) -> None:
        reason = f"the data begin anew after step {step}: the checkpoint does not hold their position, as {why}"
        not_exact(step + 1, reason)


# --- A trainer's loggers write on in the folder of the ones before ------------------------------------------------

_NEMO_VERSION = "NEMO_EXPM_VERSION"  # nemo.constants.NEMO_ENV_VARNAME_VERSION


def _keep_loggers(trainer: pl.Trainer, facts: Facts, fit: int) -> None:
    """Keep where rank 0's loggers write, and the folder name that NeMo has made up, so that they outlive it."""
    if trainer.is_global_zero:
        facts.keep(f"loggers of fit {fit}", [getattr(each, "_version", None) for each in trainer.loggers])
        if _NEMO_VERSION in os.environ:
            facts.keep("environment", {_NEMO_VERSION: os.environ[_NEMO_VERSION]})


def _resume_loggers(trainer: pl.Trainer, facts: Facts, fit: int) -> None:
    """Make new loggers of rank 0 write where those of the same fit did, before they have written anything."""
    if not trainer.is_global_zero:
        return
    for each, version in zip(trainer.loggers, facts.get(f"loggers of fit {fit}", [])):
        if version is not None and hasattr(each, "_version"):
            each._version = version
            if isinstance(each, CSVLogger):
                _keep_rows(each)


def _keep_rows(each: CSVLogger) -> None:
    """Keep the rows of a version, which Lightning would delete when it opens the version again."""
    path = Path(each.log_dir) / "metrics.csv"
    if not path.exists():
        return
    with path.open(newline="") as file:
        names = next(csv.reader(file), [])
    path.rename(path.with_suffix(".before"))  # so that Lightning neither deletes it nor warns of it
    experiment = each.experiment
    path.with_suffix(".before").replace(path)
    experiment.metrics_keys = sorted(names)


# --- Which random numbers the data-loader workers of a training draw ---------------------------------------------

_SOURCE = "data_workers"
_SAME_EACH_TIME = functools.partial(Place, None)  # a validation draws the same, whichever step it comes after


class _WorkerSeed:
    """The seed of all data-loader workers of a job, kept with the random streams of every rank."""

    def __init__(self) -> None:
        self.value: int | None = None  # before agree()
        value = functools.partial(getattr, self, "value")
        register_rng_source(_SOURCE, value, lambda _: None)

    def agree(self, states: RngStates | None) -> None:
        """Agree on the seed that ``states`` of the point to resume at have, or else on rank 0's. Collective."""
        kept = states.of_source(_SOURCE) if states is not None else None
        answers = all_gather_json({"kept": kept, "fresh": _seed_of_this_process()})
        known = [answer["kept"] for answer in answers if answer["kept"] is not None]
        self.value = known[0] if known else answers[0]["fresh"]


def _seed_of_this_process() -> int:
    """Return the seed that ``seed_everything`` was given, or else the one that torch was seeded with last."""
    given = os.environ.get("PL_GLOBAL_SEED", "")
    return int(given) if given.isdecimal() else torch.initial_seed()


def _repeat_worker_draws(loader: Iterable[object], seed: int, trainer: pl.Trainer, rank: int) -> None:
    """Make the workers of ``loader`` draw after a fault what they would have without it, or warn once."""
    training, is_persistent = trainer.training, bool(getattr(loader, "persistent_workers", False))
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    from_the_beginning = is_iterable and not isinstance(loader, Stateful)  # it is gone through once more
    try:
        seed_data_workers(
            loader,
            seed,
            rank=rank,
            stream="training" if training else "evaluation",
            place=functools.partial(_place, trainer, is_persistent, from_the_beginning)
            if training
            else _SAME_EACH_TIME,
        )
    except (TypeError, ValueError) as error:
        _warn_once(f"{error}: random numbers that its workers draw are others after a fault")
        return
    seeded = cast("DataLoader[object]", loader)  # anything else has raised TypeError, or has no workers
    if is_iterable and seeded.num_workers > 0 and not (training and from_the_beginning):
        _warn_once(
            f"{type(seeded.dataset).__name__} is iterable: random numbers that data-loader workers draw are the "
            "same after a fault only if it goes on exactly behind the last batch that was trained on"
        )


def _place(trainer: pl.Trainer, is_persistent: bool, from_the_beginning: bool) -> Place:
    """Return where the loop stands, without a reference to the loader: freed from a cycle it takes 5 s a worker."""
    if is_persistent and getattr(trainer.fit_loop, "has_spare_iterator", False):
        return Place(trainer.current_epoch - 1)  # of these workers' next iterator the epoch is one more
    if from_the_beginning:
        return Place(trainer.current_epoch)
    steps = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    sampler = getattr(trainer.strategy, "data_sampler", None)
    return Place(trainer.current_epoch, steps * getattr(sampler, "num_microbatches", 1))


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
