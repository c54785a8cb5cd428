"""What every Lightning strategy with recovery has in common; it stands before a framework's own in method order."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as stock
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import asked_for, parted
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.integrations.lightning.boundary.loops import make_resumable
from checkpointless.integrations.lightning.boundary.step_keeper import InMemoryCheckpoint
from checkpointless.integrations.lightning.checkpoints.connector import CheckpointlessCompatibleConnector
from checkpointless.integrations.lightning.data.training import TrainingData
from checkpointless.integrations.lightning.data.worker_streams import WorkerSeed, repeat_worker_draws
from checkpointless.integrations.lightning.frameworks import loggers
from checkpointless.integrations.lightning.frameworks.loggers import resume_loggers
from checkpointless.integrations.lightning.recoverable_fit import RecoverableFit, begin_manager
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import event_log
from checkpointless.recovery import CheckpointManager
from checkpointless.recovery.manager import manager_of
from checkpointless.state.journal import StepJournal

logger = logging.getLogger(__name__)


class RecoverableStrategy(ParallelStrategy):
    """A strategy that finds the running wrapper and lets a :class:`RecoverableFit` keep what a fit changes."""

    trainer: pl.Trainer  # since setup()
    warm = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._call = active_call_wrapper()
        self._rebuild = _Rebuild(self._call) if self._call is not None else None
        self._fit: RecoverableFit | None = None  # the newest one that was set up inside a block
        self._data = TrainingData()
        self._worker_seed = WorkerSeed()
        if self._call is None:
            logger.warning("no HPWrapper is active: this run has no in-process recovery")
            return
        loggers.install()
        if self._call.generation > 0:  # also in a new process, which has logged nothing yet
            loggers.quiet()

    # --- what the recovery asks for -------------------------------------------------------------------------------

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        """The manager that keeps this rank's state over restarts; None if recovery is switched off."""
        return self._fit.manager if self._fit is not None else None

    @property
    def replaying(self) -> bool:
        """Whether a committed step is replayed for what follows its update."""
        fit = self._fit
        return fit is not None and fit.keeper is not None and fit.keeper.steps.replayed is not None

    @property
    def awaits_adapters(self) -> bool:
        """Whether the adapters of a PEFT run have yet to be added; until then there is no optimizer, either."""
        return False

    def get_wrapper(self) -> HPCallWrapper | None:
        """Return the wrapper given to the trainer (``trainer.wrapper``), or the one whose block this runs in."""
        given: HPCallWrapper | None = getattr(getattr(self, "trainer", None), "wrapper", None)
        return given if given is not None else self._call

    def journal(self) -> StepJournal:
        """Return the journal of the running trainer.

        Raises:
            RuntimeError: the strategy has not been set up.
        """
        journal = self._fit.journal if self._fit is not None else None
        if journal is None:
            raise RuntimeError("the strategy has no state before setup()")
        return journal

    def rebuilt(self) -> None:
        """Record that everything is rebuilt and waits for its state."""
        if self._rebuild is not None:
            self._rebuild.end()

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        """Note that the tensors are in place, and keep the rest of the state.

        Args:
            objects: the rest of the state; what Lightning does not load is put back after Lightning has loaded its
                part.
        """
        assert self._fit is not None
        self._fit.restored_from_memory(objects)

    def restores_from_storage(self) -> None:
        """Note that a checkpoint on storage is loaded, because no rank holds the state of the fault."""
        assert self._fit is not None
        self._fit.is_from_storage = True

    def restored(self) -> None:
        """Prepare to train with the state, which is whole: from memory, from storage, or that of a new job."""
        if self._fit is not None:
            self._fit.restored()

    # --- how a fit is set up --------------------------------------------------------------------------------------

    def _build_groups(self, build: Callable[[], None]) -> None:
        """Build the process groups of this generation with ``build``."""
        if self._rebuild is None:
            build()
            return
        with self._rebuild.process_groups():
            build()

    def _resume_loggers(self) -> None:
        """Make new loggers continue where those of the fault's generation were."""
        call, module = self._call, self.lightning_module
        if call is None or call.generation == 0 or module is None:
            return
        manager = manager_of(call)
        resume_loggers(module.trainer, call.facts, (manager.fits.number if manager is not None else 0) + 1)

    def _begin_fit(
        self,
        trainer: pl.Trainer,
        make_saves: Callable[[], object],
        peft: bool = False,
        announces: bool = False,
    ) -> RecoverableFit:
        """Begin a fit of ``trainer``, whose model has been set up, inside of a block.

        Args:
            make_saves: makes what a manager that is made knows of the strategy's checkpoints.
            peft: whether a manager that is made is one for parameter-efficient fine-tuning.
            announces: whether Lightning fetches the batches, so that the phase ``data`` is announced here.

        Returns:
            The fit, which has yet to take hold of model and optimizer.

        Raises:
            UnrecoverableError: the manager cannot keep the state of such a fit, a callback does what no recovery
                could go on with, or another block of the job has trained.
        """
        call = self._call
        assert call is not None
        call.blocks.begin_training()
        call.beat()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        reason = unfit(callbacks)
        if reason is not None:
            raise UnrecoverableError(reason)
        callback = _complete(callbacks)
        for part in (call.wrapper.abort, call.wrapper.finalize):
            register = getattr(part, "register_attributes", None)
            if register is not None:
                register(trainer)
        manager = begin_manager(call, callback, peft, make_saves)
        self._fit = RecoverableFit(trainer, call, manager, self._data, self._worker_seed, announces)
        make_resumable(trainer, self._fit)
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector.adopt(trainer._checkpoint_connector)
        return self._fit

    # --- what Lightning calls -------------------------------------------------------------------------------------

    def _data_rank(self) -> int:
        """Return this rank's number among the ranks with different data."""
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
            repeat_worker_draws(loader, self._worker_seed.value, self.trainer, self._data_rank())
        return loader

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, unless recovery has put it in place already.

        Args:
            strict: whether the checkpoint's keys must match the model's.
        """
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], **options: Any) -> None:
        """Load the optimizer, unless recovery has put it in place already."""
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_optimizer_state_dict(checkpoint, **options)

    @property
    def is_left(self) -> bool:
        """Whether the trainer is left for a fault, so that other ranks may not come to where this one waits."""
        trainer: Any = getattr(self, "trainer", None)
        return self._call is not None and trainer is not None and bool(trainer.interrupted)

    def _finish_fit(self) -> bool:
        """End the fit that is torn down, if one is.

        Returns:
            Whether what the framework would tear down may be; not if a fault ended the fit: abort and finalizer
            clean up then.
        """
        trainer: Any = getattr(self, "trainer", None)
        if self.is_left or (trainer is None and self._call is not None):  # the fault came before setup()
            return False
        if self._fit is not None and trainer.state.fn == TrainerFn.FITTING:
            self._fit.finish()
        return True


# --- Callbacks that a fit in the block needs ----------------------------------------------------------------------


def _complete(present: list[Any]) -> CheckpointlessCallback:
    """Put the callbacks that the environment asks for after all others, and add what is missing.

    Args:
        present: the trainer's own list of callbacks, which is changed in place. What is added misses its ``setup``
            hook.

    Returns:
        The trainer's :class:`CheckpointlessCallback`, with the settings of the recovery.
    """
    bound = [weakref.ref(each) for each in present]
    register_cleanup("callbacks", lambda: _unbind([callback for each in bound if (callback := each())]))
    scripts, external = parted(present)
    for callback in scripts:
        if isinstance(callback, HPFaultInjectionCallback):
            callback.listen()  # it may have been made before the block was entered
    if not any(isinstance(callback, CheckpointlessCallback) for callback in scripts):
        scripts.append(CheckpointlessCallback())
    has_recorder = any(isinstance(callback, StepRecorder) for callback in scripts)
    newest = {type(callback): callback for callback in external}  # a script may give one list to several trainers
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


# --- Time to build process groups, model and optimizer ------------------------------------------------------------


class _Rebuild:
    """Times the build of one generation."""

    def __init__(self, call: HPCallWrapper) -> None:
        self._call = call
        self._began_s = 0.0

    @contextmanager
    def process_groups(self) -> Iterator[None]:
        """Time the build of the process groups, which the context makes; the rest begins when it ends."""
        call = self._call
        call.steps.entered()
        call.enter_phase("init", call.high_water)
        with event_log().span(EventName.INIT, generation=call.generation, incident=call.incident):
            yield
        call.beat()
        self._began_s = time.monotonic()
        event_log().emit(EventName.REBUILD, "begin", generation=call.generation, incident=call.incident)

    def end(self) -> None:
        """Record that everything is rebuilt and waits for its state."""
        event_log().emit(
            EventName.REBUILD,
            "end",
            generation=self._call.generation,
            incident=self._call.incident,
            seconds=time.monotonic() - self._began_s,
        )


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


def unfit(callbacks: Iterable[object]) -> str | None:
    """Say in one line why a training with ``callbacks`` cannot be recovered exactly; None: nothing is known."""
    return next(_reasons(callbacks), None)


def _reasons(callbacks: Iterable[object]) -> Iterator[str]:
    kinds = [(getattr(stock, name), reason) for name, reason in _UNFIT.items() if hasattr(stock, name)]
    for each in callbacks:
        for kind, reason in kinds:
            if isinstance(each, kind):
                yield reason.format(type(each).__name__)
