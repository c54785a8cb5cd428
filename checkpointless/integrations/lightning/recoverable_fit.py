"""One fit of a trainer in the block that is entered again: what recovery keeps of it, and how the fit resumes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.callbacks.trainer_parts import steps_made
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.inprocess.wrap import not_exact
from checkpointless.integrations.compat.lightning import set_sampler_epoch
from checkpointless.integrations.lightning.boundary.loops import ResumableFitLoop
from checkpointless.integrations.lightning.boundary.plain_attributes import parts_of
from checkpointless.integrations.lightning.boundary.step_keeper import Restoration, StepKeeper
from checkpointless.integrations.lightning.boundary.steps import StepOutcome, Steps
from checkpointless.integrations.lightning.data.position import (
    DataPosition,
    ahead_of_steps,
    keeps_its_position,
    megatron_sampler,
    samples_per_step,
    several_loaders,
)
from checkpointless.integrations.lightning.data.training import TrainingData
from checkpointless.integrations.lightning.data.validation import ValidationData
from checkpointless.integrations.lightning.data.worker_streams import WorkerSeed
from checkpointless.integrations.lightning.frameworks.loggers import keep_loggers
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.launcher.protocol.board import Facts
from checkpointless.recovery import CheckpointManager, PEFTCheckpointManager
from checkpointless.recovery.decide import Verdict
from checkpointless.recovery.guard import vote
from checkpointless.recovery.manager import manager_of
from checkpointless.state.journal import StepJournal
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.declared import DeclaredState, begin_declared

_BEGAN = "where the data began"  # the fact: the step and the samples that the fit began at


def begin_manager(
    call: HPCallWrapper, callback: CheckpointlessCallback, peft: bool, make_saves: Callable[[], object]
) -> CheckpointManager | None:
    """Begin a fit with the manager that keeps this rank's state over restarts, made if the block has none yet.

    Args:
        peft: whether a manager that is made is one for parameter-efficient fine-tuning.
        make_saves: makes what a manager that is made knows of the strategy's checkpoints.

    Returns:
        The manager; None if recovery from memory is switched off.

    Raises:
        UnrecoverableError: the manager cannot keep the state of such a fit.
    """
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


class RecoverableFit:
    """One fit of a trainer, which is kept from step to step and resumes after a fault.

    The loops report their points to it (:class:`checkpointless.integrations.lightning.boundary.loops._Observer`).

    Args:
        trainer: the trainer, whose strategy has been set up. Optimizers may be missing, in a PEFT run.
        manager: keeps this rank's state over restarts; None: recovery from memory is switched off.
        announces_data: whether Lightning fetches the batches, so that the phase ``data`` is announced here.

    Attributes:
        keeper: takes the state; None: a PEFT run has neither adapters nor an optimizer yet.
        is_from_storage: whether the state is that of a checkpoint on storage, older than that of the fault.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        call: HPCallWrapper,
        manager: CheckpointManager | None,
        data: TrainingData,
        worker_seed: WorkerSeed,
        announces_data: bool = False,
    ) -> None:
        self.manager = manager
        self._announces_data = announces_data
        self._trainer = trainer
        self._call = call
        self._data = data
        self._worker_seed = worker_seed
        self._stored = _StoredPosition(trainer, call.facts)
        self.keeper: StepKeeper | None = None
        self._restoration: Restoration | None = None
        self._restored_without_adapters = self.is_from_storage = False
        self._validation_data: ValidationData | None = None
        if manager is not None:
            repeated_steps.begin_entry(call.is_first)
            self._validation_data = ValidationData(trainer)
            old, saves = weakref.ref(trainer), manager.saves
            begin_declared(DeclaredState(lambda: parts_of(old())))
            register_cleanup("saves", lambda: saves.let_go(old()))

    # --- what it holds ------------------------------------------------------------------------------------------

    def take_hold(self, steps: Steps) -> None:
        """Take hold of model and optimizer, which are built, and guard the update."""
        self.keeper = StepKeeper(self._trainer, self._call, self.manager, self.position, steps)

    def position(self) -> DataPosition:
        """Return where the training stands in its data."""
        return self._data.position(cast("ResumableFitLoop", self._trainer.fit_loop))

    def fetched(self) -> int:
        """Return how many batches Lightning's fetcher has counted."""
        return self._data.fetched(cast("ResumableFitLoop", self._trainer.fit_loop))

    @property
    def journal(self) -> StepJournal | None:
        """The journal of the fit; None before :meth:`take_hold`."""
        return self.keeper.journal if self.keeper is not None else None

    @property
    def is_under_way(self) -> bool:
        """Whether the fit is being run, and could be recovered."""
        return self.manager is not None and self.keeper is not None and self.keeper.journal.newest is not None

    @property
    def replayed(self) -> StepOutcome | None:
        """The outcome of the committed step that is replayed; None: a step is computed."""
        return self.keeper.steps.replayed if self.keeper is not None else None

    def _job_step(self) -> int:
        """Return the optimizer step that the trainer is at, counted over all fits of the block."""
        offset = self.manager.fits.offset if self.manager is not None else 0
        return steps_made(self._trainer) + offset

    # --- what the loops report ----------------------------------------------------------------------------------

    def reached(self, stage: SnapshotPoint) -> None:
        """Take the state of the point that the loops have reached: ``stage`` after the newest step."""
        if self.manager is None or self.keeper is None:
            return
        self.keeper.journal.reached(self._job_step(), stage)

    def before_fetch(self) -> None:
        """Announce that a batch is asked for, unless what fetches batches in the step does so itself."""
        if self._announces_data and self.replayed is None:
            self._call.enter_phase("data", self._job_step() + 1)

    def epoch_begins(self) -> None:
        """Begin an epoch; the one before it was over when it was resumed."""
        self._data.begin_epoch()

    def data_is_set_up(self, loaders: Sequence[Any]) -> None:
        """Refuse training loaders that could not be brought back to where they stood.

        Raises:
            UnrecoverableError: there are several loaders.
        """
        if self.manager is not None and len(loaders) > 1:
            raise UnrecoverableError(several_loaders(len(loaders)))
        self._data.set_up()

    # --- when the state is whole --------------------------------------------------------------------------------

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        """Note that the tensors are in place, and keep the rest of the state.

        Args:
            objects: the rest of the state; what Lightning does not load is put back after Lightning has loaded its
                part.
        """
        assert self.manager is not None
        assert self.keeper is not None
        self._restoration = Restoration(objects, self._trainer, self.manager, self.keeper, self._data)

    @property
    def _is_resuming(self) -> bool:
        """Whether the state is from memory, and a part of it is still to be put back."""
        return self._restoration is not None and self._restoration.is_pending

    def restored(self) -> None:
        """Prepare to train with the state, which is whole: from memory, from storage, or that of a new job."""
        call, manager = self._call, self.manager
        if manager is None:
            return
        keep_loggers(self._trainer, call.facts, manager.fits.number)
        resumed_at = manager.resumed_at if self._is_resuming else None
        if call.generation > 0:
            manager.saves.agree(resumed_at, self._trainer.strategy)
        manager.saves.watch(self._trainer.strategy)
        if manager.verdict is Verdict.SKIP:
            return
        step = resumed_at[0] if resumed_at is not None else self._job_step()
        self._worker_seed.agree(manager.own.streams.newest(step))
        if self._restoration is not None and self._restoration.is_pending:
            self._restoration.resume()
        elif self.is_from_storage:
            self._stored.resume(step)
        else:
            self._stored.begin(step)
        if self.keeper is None:
            self._restored_without_adapters = True
        else:
            if not self._is_resuming:
                self.keeper.journal.begin(self._job_step(), SnapshotPoint.LOADED)
            manager.attach(self.keeper.journal, step)
        call.steps.begin_data(samples_per_step(self._trainer))

    def adapters_added(self, params_to_save: Iterable[str]) -> None:
        """Note that the adapters are in place with their values, unless memory is about to give them the values.

        Args:
            params_to_save: the names of the parameters that training changes, adapters among them.
        """
        manager, keeper = self.manager, self.keeper
        if manager is None or keeper is None:
            return
        if isinstance(manager, PEFTCheckpointManager):
            manager.params_to_save = set(params_to_save)
        if self._restored_without_adapters:
            self._restored_without_adapters = False
            keeper.journal.begin(self._job_step(), SnapshotPoint.CHECKED)
            vote()  # an attached rank can be recovered from: by then every rank's streams are on its board
            manager.attach(keeper.journal, self._job_step())

    # --- while it is run ----------------------------------------------------------------------------------------

    def loader_is_due(self) -> None:
        """Prepare for a loader that is about to be made."""
        if self._restoration is not None and self._trainer.training:
            self._restoration.put_sampler()

    def loader_is_made(self, loader: Iterable[object]) -> None:
        """Follow a loader that has just been made, and bring it to where the data stood before the fault.

        Raises:
            UnrecoverableError: the loader's position could not be restored.
        """
        if self.manager is not None and self._trainer.training:
            reason = ahead_of_steps(loader) if self._announces_data else None
            if reason is not None:
                raise UnrecoverableError(reason)
            position = self._restoration.position() if self._restoration is not None else None
            if position is not None:  # Lightning tells the sampler too late: workers ask for their items at once
                epochs: Any = self._trainer.fit_loop.epoch_progress
                set_sampler_epoch(loader, epochs.current.processed)
            self._data.made(loader, self.manager.own.streams, position)
            self._stored.made(loader)
        elif self._validation_data is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._validation_data.made(loader)

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step, or replay one, in which nothing is updated."""
        return self.keeper.steps.update(make) if self.keeper is not None else make()

    def save(self, path: str, make: Callable[[], None], **background: Any) -> None:
        """Make a save, unless it was made before a fault that makes the ranks pass this point once more.

        Args:
            **background: what goes on with it in the background, as the strategy's saves take it.
        """
        if self.manager is None or self.keeper is None or not self.is_under_way:
            make()
        else:
            self.manager.saves.save(path, self.keeper.journal.newest, make, **background)

    def finish(self) -> None:
        """End the fit, if it is under way. Collective."""
        if self.manager is not None and self.keeper is not None and self.is_under_way:
            vote()  # the last hooks have run on every rank: no rank goes back into this fit
            self.manager.fits.finish(self.keeper.journal.objects())
            self.manager.copies.finish()


# --- Position in the data after a checkpoint on storage -----------------------------------------------------------


class _StoredPosition:
    """The position in the data of a fit that resumes from storage after a fault.

    NeMo keeps the position in the data module's ``state_dict``, and Lightning in that of a loader. Where there is
    none, the data would start over without a word.
    """

    def __init__(self, trainer: pl.Trainer, facts: Facts) -> None:
        self._trainer, self._facts = trainer, facts
        self._step = 0  # the step that the fit resumes after, if the position in its epoch is not known yet

    def begin(self, step: int) -> None:
        """Note where the data of a fit begin that begins after ``step``, with what the script has loaded."""
        sampler = megatron_sampler(self._trainer)
        self._facts.keep(_BEGAN, [step, int(sampler.init_consumed_samples) if sampler is not None else None])

    def resume(self, step: int) -> None:
        """Bring NeMo's sampler to where it stood after ``step``, unless the data module has done that.

        Raises:
            UnrecoverableError: the data start over, and the job is to end then (``--strict``).
        """
        trainer: Any = self._trainer
        sampler = megatron_sampler(trainer)
        began_step, began_samples = self._facts.get(_BEGAN, [step, None])
        if step <= began_step:
            return
        if sampler is None:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self._step = step if progress.current.ready and not progress.is_last_batch else 0
            return
        if sampler.init_consumed_samples != began_samples:
            return  # the data module has a state_dict
        size = samples_per_step(trainer)
        if size is None or trainer.current_epoch:
            self._begins_anew(step, "the data module has no state_dict")
            return
        sampler.init_consumed_samples = sampler.prev_consumed_samples = began_samples + (step - began_step) * size
        sampler.if_first_step = 1  # as NeMo's data modules set it
        sampler.init_global_step = trainer.global_step

    def made(self, loader: object) -> None:
        """Look at the training loader that was made for the epoch in which the fit resumes.

        Raises:
            UnrecoverableError: its batches start over, and the job is to end then (``--strict``).
        """
        step, self._step = self._step, 0
        if step and not keeps_its_position(loader):
            self._begins_anew(step, "the loader has no state_dict")

    def _begins_anew(self, step: int, why: str) -> None:
        reason = f"the data begin anew after step {step}: the checkpoint does not hold their position, as {why}"
        not_exact(step + 1, reason)
