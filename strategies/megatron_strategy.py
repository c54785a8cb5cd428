"""NeMo's Megatron strategy with recovery from living replicas."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.utils import get_model_config
from nemo.constants import NEMO_ENV_VARNAME_VERSION
from nemo.lightning.pytorch.strategies import MegatronStrategy
from torch.utils.data import DataLoader
from typing_extensions import override

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import without_external
from checkpointless.callbacks.step_recorder import loss_of
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError, active_call_wrapper
from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.megatron import cleanup as megatron_cleanup
from checkpointless.megatron.update import GuardedUpdate, NotedNorms
from checkpointless.recovery import CheckpointManager, PEFTCheckpointManager
from checkpointless.recovery.decide import Verdict
from checkpointless.recovery.guard import vote
from checkpointless.recovery.manager import manager_of
from checkpointless.recovery.moment import Stage
from checkpointless.strategies import chatter, cleanup, one_logger
from checkpointless.strategies.boundary import ACCUMULATED, InMemoryCheckpoint, load_again, put_kinds
from checkpointless.strategies.connector import CheckpointlessCompatibleConnector
from checkpointless.strategies.data_position import (
    DataPosition,
    TrackedSampler,
    go_on_counting,
    keeps_its_position,
    put_sampler,
    samples_per_step,
    several_loaders,
    track,
)
from checkpointless.strategies.epoch_metrics import (
    own_part,
    put_accumulated,
    take_accumulated,
    warn_if_lost,
    with_own,
)
from checkpointless.strategies.live_state import TrainerLiveState
from checkpointless.strategies.loggers import forget_rows, rows_of, versions_of, write_on
from checkpointless.strategies.loops import Resumption, make_resumable
from checkpointless.strategies.peft import StateBeforeAdapters, peft_of, trained_names
from checkpointless.strategies.phases import PhasedIterator, announce_gradient_sync
from checkpointless.strategies.replay import KeptReduction, StepOutcome, StepOutcomes, with_own_loss
from checkpointless.strategies.saves import PendingSaves, Saves, leave_unfinished, let_go
from checkpointless.strategies.validation_data import ValidationData
from checkpointless.strategies.worker_streams import WorkerSeed, repeat_worker_draws
from checkpointless.telemetry.events import event_log

logger = logging.getLogger(__name__)

_ROWS = "rows"  # the fact that records how many rows the loggers had when the newest validation began


class CheckpointlessMegatronStrategy(MegatronStrategy):
    """A ``MegatronStrategy`` that recovers from a fault without a checkpoint.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper`, it finds the running wrapper and
    installs the rest: checkpoint manager, checkpoint connector, the guard around the optimizer update, and the
    clean-up of Megatron's and NeMo's globals. Elsewhere it behaves like ``MegatronStrategy`` does
    with the same arguments.

    Args:
        *args: the positional arguments of ``MegatronStrategy``.
        num_distributed_optimizer_instances: the number of replicas of the optimizer's shards. Default: 2
            (``MegatronStrategy``: 1). With 1, a rank that dies can only be replaced from storage.
        **kwargs: the keyword arguments of ``MegatronStrategy``.

    Attributes:
        base_store: the store on which the process groups were built; None before that.
    """

    def __init__(self, *args: Any, num_distributed_optimizer_instances: int = 2, **kwargs: Any) -> None:
        super().__init__(*args, num_distributed_optimizer_instances=num_distributed_optimizer_instances, **kwargs)
        self.base_store: dist.Store | None = None
        self._call = active_call_wrapper()
        self._live: TrainerLiveState | None = None
        self._awaits_adapters = False
        self._put_off_restore = False
        self._restored_without_adapters = False
        self._manager: CheckpointManager | None = None
        self._rebuild_began_s = 0.0
        self._fault_injection: HPFaultInjectionCallback | None = None
        self._worker_seed = WorkerSeed()
        self._guard: GuardedUpdate | None = None
        self._outcomes: StepOutcomes | None = None
        self._restored_objects: dict[str, Any] | None = None  # what memory gave, until the loops resume
        self._tracked: TrackedSampler | None = None
        self._validation_data: ValidationData | None = None
        if self._call is None:
            logger.warning("no HPWrapper is active: this run has no in-process recovery")
            return
        # Without the distributed optimizer all data-parallel ranks hold the same optimizer state.
        sharded = getattr(self.ddp_config, "use_distributed_optimizer", True)
        if num_distributed_optimizer_instances < 2 and sharded:
            logger.warning("one optimizer instance: a rank that dies cannot be restored from memory")
        self._fault_injection = HPFaultInjectionCallback.from_environment()
        megatron_cleanup.install()
        cleanup.install()
        chatter.install()
        one_logger.install()
        if self._call.generation > 0:  # also in a new process, which has logged nothing yet
            chatter.quiet()

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        """The manager that keeps this rank's state over restarts; None if recovery is switched off."""
        return self._manager

    @property
    def replaying(self) -> bool:
        """Whether a committed step is replayed for what follows its update."""
        return self._outcomes is not None and self._outcomes.replayed is not None

    def get_wrapper(self) -> HPCallWrapper | None:
        """Return the wrapper given to the trainer (``trainer.wrapper``), or the one whose block this runs in."""
        given: HPCallWrapper | None = getattr(getattr(self, "trainer", None), "wrapper", None)
        return given if given is not None else self._call

    def is_peft(self) -> bool:
        """Return whether the trainer has a PEFT callback."""
        return peft_of(self.trainer) is not None

    @property
    def awaits_adapters(self) -> bool:
        """Whether NeMo has yet to add the adapters of a PEFT run; until then there is no optimizer, either."""
        return self._awaits_adapters

    def live_state(self) -> TrainerLiveState:
        """Return the state of the running trainer; before the adapters are added, that of the base model.

        Raises:
            RuntimeError: the strategy has not been set up.
        """
        if self._awaits_adapters:
            return StateBeforeAdapters(self.trainer)
        if self._live is None:
            raise RuntimeError("the strategy has no state before setup()")
        return self._live

    @override
    def setup_environment(self) -> None:
        """Set up the process groups, and make new loggers continue where the old ones were."""
        super().setup_environment()
        call, trainer = self._call, self.lightning_module.trainer if self.lightning_module is not None else None
        if call is None or call.generation == 0 or trainer is None:
            return
        manager = manager_of(call)
        leave_unfinished(manager is not None and manager.saves is not None and manager.saves.pending is not None)
        if not trainer.is_global_zero:
            return
        fit = (manager.fit if manager is not None else 0) + 1
        write_on(trainer, call.facts.get(f"loggers of fit {fit}", []))

    @override
    def setup_distributed(self) -> None:
        """Build the process groups of this generation."""
        call = self._call
        if call is None:
            super().setup_distributed()
            return
        call.enter_phase("init", call.high_water)
        with event_log().span("init", generation=call.generation, incident=call.incident):
            super().setup_distributed()
        self.base_store = dist.distributed_c10d._get_default_store()
        call.beat()
        self._rebuild_began_s = time.monotonic()
        event_log().emit("rebuild", "begin", generation=call.generation, incident=call.incident)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up model and optimizer, and install what recovery needs.

        Args:
            trainer: the trainer.
        """
        super().setup(trainer)
        call = self._call
        self._awaits_adapters = trainer.state.fn == TrainerFn.FITTING and not self.optimizers and self.is_peft()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if call is None or not fitting or not (self.optimizers or self._awaits_adapters):
            return
        call.beat()
        self._add_callbacks(trainer)
        for part in (call.wrapper.abort, call.wrapper.finalize):
            register = getattr(part, "register_attributes", None)
            if register is not None:
                register(trainer)
        make_resumable(trainer, self)
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector.adopt(trainer._checkpoint_connector)
        callback = next(each for each in _callbacks(trainer) if isinstance(each, CheckpointlessCallback))
        call.restart_in_process = callback.enable_inprocess
        if callback.enable_checkpointless:
            self._manager = manager_of(call)
            if self._manager is None:
                self._manager = PEFTCheckpointManager() if self._awaits_adapters else CheckpointManager()
                call.checkpoint_manager = self._manager
            if callback.enable_checksum:
                self._manager.enable_checksum = True
            self._manager.begin_fit()
            if self._manager.saves is None:
                self._manager.saves = Saves()
            self._validation_data = ValidationData(trainer)
            old, saves = weakref.ref(trainer), self._manager.saves
            register_cleanup("saves", lambda: let_go(old()) if saves.pending is not None else None)
        if not self._awaits_adapters:
            self._take_hold(trainer, call)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Set up the optimizers. In a PEFT run NeMo does this late, after it has added the adapters."""
        super().setup_optimizers(trainer)
        if self._awaits_adapters and self._call is not None:
            self._awaits_adapters = False
            self._take_hold(trainer, self._call)

    @override
    def selective_restore(self) -> None:
        """Load what NeMo's ``restore_config`` asks for, for example the weights of a pretrained model.

        After a fault memory is asked first, and :meth:`restore_from_storage` is called if that fails.
        """
        call = self._call
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        self._put_off_restore = fitting and call is not None and call.generation > 0
        if not self._put_off_restore:
            super().selective_restore()

    def restore_from_storage(self) -> None:
        """Load what :meth:`selective_restore` put off."""
        if self._put_off_restore:
            self._put_off_restore = False
            super().selective_restore()

    def add_adapters(self) -> None:
        """Make NeMo add the adapters of a PEFT run and set up the optimizer now, not when the first epoch begins.

        A restart from memory needs the adapters in place, and then overwrites their initial values.
        """
        peft = peft_of(self.trainer)
        if self._awaits_adapters and peft is not None:
            peft.apply_transform(self.trainer)
            self.adapters_added(peft.params_to_save)

    def adapters_added(self, params_to_save: Iterable[str]) -> None:
        """Note that the adapters are in place with their values, unless memory is about to give them the values.

        Args:
            params_to_save: the names of the parameters that NeMo saves as adapters.
        """
        manager = self._manager
        if manager is None or self._live is None:
            return
        if isinstance(manager, PEFTCheckpointManager):
            manager.params_to_save = {*params_to_save, *trained_names(self.megatron_parallel)}
        if self._restored_without_adapters:
            self._restored_without_adapters = False
            manager.begin_buffers(self._live)
            self.reached(Stage.CHECKED)
            vote()  # an attached rank can be recovered from: by then every rank's streams are on its board
            manager.attach(self._live, self._job_step())

    def keep_saves(self) -> None:
        """Keep, after a fault, the checkpoints that are being written in the background, to finish them later."""
        pending = PendingSaves.of(self._checkpoint_io)
        if pending is not None and self._manager is not None:
            self._manager.saves.pending = pending

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint, unless it was saved before a fault that makes the ranks pass this point once more."""
        save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        if self._manager is None or self._live is None or not self._live.is_under_way:
            save()
            return
        finish = (storage_options or {}).get("finalize_fn")
        calls = getattr(self.checkpoint_io, "async_calls_queue", None)
        self._manager.saves.save(str(filepath), self._live.newest_moment, calls, finish, save)

    def rebuilt(self) -> None:
        """Record that everything is built anew and waits for its state."""
        call = self._call
        if call is not None:
            event_log().emit(
                "rebuild",
                "end",
                generation=call.generation,
                incident=call.incident,
                seconds=time.monotonic() - self._rebuild_began_s,
            )

    def restored(self) -> None:
        """Prepare to train with the state, which is whole: from memory, from storage, or that of a new job."""
        call, manager = self._call, self._manager
        if call is None or manager is None:
            return
        self._keep_facts(call, manager.fit)
        if call.generation > 0:
            manager.saves.agree(manager.resumed_at if self._restored_objects is not None else None, self)
            leave_unfinished(False)
        if manager.verdict is Verdict.SKIP:
            return
        resumed = self._restored_objects is not None and manager.resumed_at is not None
        step = manager.resumed_at[0] if resumed and manager.resumed_at is not None else self._job_step()
        self._worker_seed.agree(manager.rng_of(step))
        if self._restored_objects is not None:
            self._resume(self._restored_objects)
        if self._awaits_adapters:
            self._restored_without_adapters = True
        else:
            if self._restored_objects is None:
                manager.begin_buffers(self.live_state())
                self.reached(Stage.LOADED)
            manager.attach(self.live_state(), step)
        call.steps.begin_data(samples_per_step(self.trainer))

    def _keep_facts(self, call: HPCallWrapper, fit: int) -> None:
        """Keep where loggers write and the folder name that NeMo has made up, so that they outlive rank 0."""
        if self.trainer.is_global_zero:
            call.facts.keep(f"loggers of fit {fit}", versions_of(self.trainer))
            if NEMO_ENV_VARNAME_VERSION in os.environ:
                call.facts.keep("environment", {NEMO_ENV_VARNAME_VERSION: os.environ[NEMO_ENV_VARNAME_VERSION]})

    def skip_fit(self, objects: dict[str, Any] | None) -> dict[str, Any]:
        """Skip a fit that was over before the fault, which came in a later fit of the same block.

        Args:
            objects: the non-tensor state that the fit ended in; None if no rank knows it.

        Returns:
            The part of that state that Lightning loads.
        """
        logger.warning(
            "this fit was over before the fault and is not made again; until the next fit of the block begins, the "
            "model's weights are not those that it ended with"
        )
        self.trainer.fit_loop.was_finished = True  # type: ignore[attr-defined]
        if objects is None:
            return {}
        put_kinds(self.trainer, objects["kinds"])
        checkpoint: dict[str, Any] = objects["checkpoint"]
        return checkpoint

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        """Note that the tensors are in place, and keep the rest of the state.

        Args:
            objects: the rest of the state; what Lightning does not load is put back after Lightning has loaded its
                part.
        """
        self._restored_objects = objects

    def _resume(self, objects: dict[str, Any]) -> None:
        """Put back the part of the state that Lightning does not load, and set where the loops resume."""
        manager = self._manager
        assert manager is not None
        assert manager.resumed_at is not None
        step, stage = manager.resumed_at
        replays = stage is Stage.COMMITTED
        kept = objects["kinds"][ACCUMULATED]
        if manager.was_filled:
            warn_if_lost(objects["outcome"]["accumulated"] if replays else kept, manager.own_of(step, stage))
        kept = self._own_of(kept, *((step - 1, Stage(objects["base"])) if replays else (step, stage)))
        objects = {**objects, "kinds": {**objects["kinds"], ACCUMULATED: kept}}
        put_kinds(self.trainer, objects["kinds"])
        put_sampler(self.trainer, objects["sampler"])
        if stage is Stage.LOADED:
            self._restored_objects = None
            manager.restore_streams()
            return
        resumption = Resumption(
            stage,
            lambda: self._go_on(objects),
            lambda run: self._do_again(objects, run),
            _begins_epoch(stage, objects),
        )
        self.trainer.fit_loop.resumption = resumption  # type: ignore[attr-defined]

    def _go_on(self, objects: dict[str, Any]) -> None:
        """Put the state back again, after the loops have begun with hooks and iterators that changed it."""
        trainer, manager = self.trainer, self._manager
        assert manager is not None
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        fetcher: Any = trainer.fit_loop._data_fetcher
        position = DataPosition(*objects["data"])
        step, stage = manager.resumed_at or (0, Stage.LOADED)
        if _begins_epoch(stage, objects):
            if self._tracked is not None:
                self._tracked.begin_at(position.consumed)
        elif objects["base"] != Stage.LOADED:  # after LOADED, Lightning knows where the data stood
            self._take_what_was_delivered(fetcher, position)
            fetcher.fetched, fetcher.length = position.fetched, position.length
            fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length
            go_on_counting(fetcher, position)
            epoch_loop.not_delivered = position.fetched - position.delivered
        load_again(trainer, objects["checkpoint"])
        put_kinds(trainer, objects["kinds"])
        manager.saves.forget_lost(_callbacks(trainer))
        put_sampler(trainer, objects["sampler"])
        self._restored_objects = None
        if self._live is not None:
            self._live.put_buffers_back()
        if trainer.is_global_zero:
            logged = self._call.facts.get(_ROWS, [-1, []]) if self._call is not None else [-1, []]
            kept = logged[1] if stage is Stage.ENDED and logged[0] == step else []
            forget_rows(trainer, epoch_loop._batches_that_stepped, kept)
        if stage is Stage.COMMITTED:  # what led to the step is replayed, with the streams from before it
            base = Stage(objects["base"])
            if not manager.restore_streams_of(step - 1, base) and base is not Stage.LOADED:
                logger.warning("what is drawn between steps %d and %d is drawn anew", step - 1, step)
        else:
            manager.restore_streams()

    def _own_of(self, kept: dict[str, Any], step: int, stage: Stage) -> dict[str, Any]:
        """Return what this rank itself accumulated over the epoch, although ``kept`` may come from a peer."""
        assert self._manager is not None
        own = self._manager.own_of(step, stage)
        return with_own(kept, own) if own is not None or self._manager.was_filled else kept

    def _take_what_was_delivered(self, fetcher: Any, position: DataPosition) -> None:
        """Advance an iterator whose batches only the dataset knows past those that were delivered."""
        loaders = self.trainer.fit_loop._combined_loader.flattened  # type: ignore[union-attr]
        if self._tracked is None and not any(keeps_its_position(loader) for loader in loaders):
            for _ in range(position.delivered):
                next(fetcher.iterator)

    def _do_again(self, objects: dict[str, Any], run: Callable[[], None]) -> None:
        """Let Lightning replay the last committed step without computing it."""
        assert self._outcomes is not None
        assert self._manager is not None
        outcome = StepOutcome(**objects["outcome"])
        step, _ = self._manager.resumed_at or (-1, Stage.COMMITTED)
        states = self._manager.rng_of(step)
        with self._outcomes.replay(with_own_loss(outcome, states.loss if states is not None else None)):
            run()

    def reached(self, stage: Stage) -> None:
        """Take the state of the moment that the loops have reached: ``stage`` after the newest step."""
        if self._manager is not None and self._live is not None:
            step = self._job_step()
            buffers = self._live.copy_buffers()
            self._manager.keep_buffers(step, stage, buffers)  # first: streams of a moment imply its buffers
            store = partial(self._manager.store_rng_states, step, stage=stage)
            self._live.reached(
                step, stage, buffers, lambda objects: store(own=own_part(objects["kinds"][ACCUMULATED]))
            )
            if stage is Stage.ENDED and self._call is not None and self.trainer.is_global_zero:
                self._call.facts.keep(_ROWS, [step, rows_of(self.trainer)])

    def epoch_begins(self) -> None:
        """Begin an epoch; the one before it was over when it was resumed."""
        if self._tracked is not None:
            self._tracked.begin_epoch()

    def data_is_set_up(self, loaders: Sequence[Any]) -> None:
        """Refuse training loaders that could not be brought back to where they stood.

        Args:
            loaders: all training loaders that the trainer was given.

        Raises:
            UnrecoverableError: there are several loaders.
        """
        if self._manager is not None and len(loaders) > 1:
            raise UnrecoverableError(several_loaders(len(loaders)))
        if self._tracked is not None:
            self._tracked.set_up()

    def _job_step(self) -> int:
        """Return the optimizer step that the trainer is at, counted over all fits of the block."""
        offset = self._manager.offset if self._manager is not None else 0
        return int(self.trainer.global_step) + offset

    def _position(self) -> DataPosition:
        """Return where the training stands in its data."""
        fit_loop: Any = self.trainer.fit_loop
        fetcher = fit_loop._data_fetcher
        fetched = fetcher.fetched if fetcher is not None else 0
        tracked = self._tracked
        return DataPosition(
            fetched,
            fetched - fit_loop.epoch_loop.not_delivered,
            tracked.began_at if tracked is not None else None,
            tracked.consumed if tracked is not None else None,
            length=fetcher.length if fetcher is not None else None,
            length_at_start=tracked.length_at_start if tracked is not None else None,
        )

    @override
    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        """Distribute the samples to the ranks, and make what workers draw independent of faults."""
        training = self._call is not None and self._manager is not None and self.trainer.training
        objects = self._restored_objects
        if training and objects is not None:  # so that the loader is made as it was at the start
            put_sampler(self.trainer, objects["sampler"])
        loader = super().process_dataloader(dataloader)
        if training and self._manager is not None:
            position = self._begin_at(objects)
            self._tracked = None if keeps_its_position(loader) else track(loader, self._manager, position)
        elif self._validation_data is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._validation_data.made(loader)
        if self._worker_seed.value is not None:
            repeat_worker_draws(loader, self._worker_seed.value, self.trainer)
        return loader

    def _begin_at(self, objects: dict[str, Any] | None) -> DataPosition | None:
        resumed_at = self._manager.resumed_at if self._manager is not None else None
        if objects is None or resumed_at is None:
            return None
        position = DataPosition(*objects["data"])
        if not _begins_epoch(resumed_at[1], objects):
            return position
        length = position.length_at_start if not self.trainer.reload_dataloaders_every_n_epochs else None
        return dataclasses.replace(position, within=False, length_at_start=length)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, unless recovery has put it in place already.

        Args:
            checkpoint: the checkpoint.
            strict: whether the checkpoint's keys must match the model's.
        """
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], selective_restore: bool = False) -> None:
        """Load the optimizer, unless recovery has put it in place already."""
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_optimizer_state_dict(checkpoint, selective_restore=selective_restore)

    def on_train_start(self) -> None:
        """Let the frameworks log again, and announce from now on when gradients are reduced."""
        chatter.speak()
        if self._call is not None:
            announce_gradient_sync(get_model_config(self.megatron_parallel[0]), self._call)

    @override
    def training_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one training step."""
        call, outcomes = self._call, self._outcomes
        if outcomes is not None and outcomes.replayed is not None:
            return super().training_step(
                dataloader_iter, *args, loss_reduction=KeptReduction(outcomes.replayed), **kwargs
            )
        if call is not None:
            dataloader_iter = PhasedIterator.around(dataloader_iter, call)
        output = super().training_step(dataloader_iter, *args, **kwargs)
        if call is not None:
            call.steps.loss = loss_of(output)
        return output

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one optimizer step, or replay what belongs to one without its update."""
        outcome = self._outcomes.replayed if self._outcomes is not None else None
        if outcome is None:
            return super().optimizer_step(optimizer, *args, **kwargs)
        mcore_optimizer: Any = self.optimizers[0].mcore_optimizer
        kept = outcome.succeeded, outcome.grad_norm, outcome.num_zeros

        def step() -> tuple[bool, Any, Any]:
            """Stand in for the update: put back what forward and backward have logged, and compute nothing."""
            assert self._manager is not None
            assert self._manager.resumed_at is not None
            put_accumulated(self.trainer, self._own_of(outcome.accumulated, *self._manager.resumed_at))
            return kept

        mcore_optimizer.step = step
        try:
            return super().optimizer_step(optimizer, *args, **kwargs)
        finally:
            del mcore_optimizer.step
            if self._manager is not None:
                self._manager.restore_streams()

    @override
    def teardown(self) -> None:
        """Tear down, but leave the state alone if a fault ended the run: abort and finalizer clean up then."""
        trainer = getattr(self, "trainer", None)  # missing if the fault came before setup()
        if self._call is not None and (trainer is None or trainer.interrupted):
            if hasattr(self, "megatron_parallel"):
                self.megatron_parallel.teardown_ddp()
            return
        fitted = trainer is None or trainer.state.fn == TrainerFn.FITTING
        if fitted and self._manager is not None and self._live is not None and self._live.is_under_way:
            vote()  # the last hooks have run on every rank: no rank goes back into this fit
            self._manager.finish_fit(self._live.newest())
        super().teardown()

    def _take_hold(self, trainer: pl.Trainer, call: HPCallWrapper) -> None:
        """Take hold of model and optimizer, which are built now, and guard the update."""
        optimizer = self.optimizers[0].mcore_optimizer
        self._live = live = TrainerLiveState(trainer, self._position)
        self._outcomes = StepOutcomes(NotedNorms(optimizer), lambda: self._position().fetched)
        self.megatron_parallel.callbacks.add(self._outcomes)
        self._guard = GuardedUpdate(
            optimizer,
            lock=call.parameter_update_lock,
            step=lambda: call.steps.making,
            ready=self._gradients_are_final,
            applied=live.applied,
            committed=call.committed,
            phase=call.enter_phase,
        )

    def _add_callbacks(self, trainer: pl.Trainer) -> None:
        """Add callbacks that the environment asks for or that are missing; they missed their ``setup`` hook."""
        present = _callbacks(trainer)
        present[:] = without_external(present)
        for callback in present:
            if isinstance(callback, HPFaultInjectionCallback):
                callback.listen()  # it may have been made before the block was entered
        added: list[Any] = []
        if not any(isinstance(callback, CheckpointlessCallback) for callback in present):
            added.append(CheckpointlessCallback())
        recorder = StepRecorder.from_environment()
        if recorder is not None and not any(isinstance(callback, StepRecorder) for callback in present):
            added.append(recorder)
        if self._fault_injection is not None:
            added.append(self._fault_injection)
            self._fault_injection.listen()
        present.extend(added)

    def _gradients_are_final(self, step: int) -> None:
        call = self._call
        if call is None:
            return
        call.enter_phase("before_optimizer", step)
        if self._manager is not None and self._live and self._outcomes and self._guard:
            accumulated = take_accumulated(self.trainer)
            buffers = self._live.copy_buffers()
            self._live.ready(step, self._outcomes.outcome(not self._guard.overflow, accumulated), buffers)
            self._manager.keep_buffers(step, Stage.COMMITTED, buffers)
            self._manager.store_rng_states(step, loss=call.steps.loss, own=own_part(accumulated))
            self._manager.replicate_rng_states(step)
        call.parameter_update_lock.mark_ready(step)


def _begins_epoch(stage: Stage, objects: Mapping[str, Any]) -> bool:
    """Return whether an epoch begins where the loops resume."""
    return stage is Stage.TURNED or (stage is Stage.COMMITTED and objects["base"] == Stage.TURNED)


def _callbacks(trainer: Any) -> list[Any]:
    """Return the trainer's own list of callbacks, not a copy."""
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def _signature() -> inspect.Signature:
    """Return the signature of ``MegatronStrategy`` with our default, which editors show and NeMo-Run relies on."""
    name = "num_distributed_optimizer_instances"
    default = inspect.signature(CheckpointlessMegatronStrategy.__init__).parameters[name].default
    theirs = inspect.signature(MegatronStrategy)
    parameters = {**theirs.parameters, name: theirs.parameters[name].replace(default=default)}
    return theirs.replace(parameters=list(parameters.values()))


CheckpointlessMegatronStrategy.__signature__ = _signature()  # type: ignore[attr-defined]
