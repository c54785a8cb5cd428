"""NeMo's Megatron strategy with recovery from living replicas."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.utils import get_model_config
from nemo.lightning.pytorch.strategies import MegatronStrategy
from torch.utils.data import DataLoader
from typing_extensions import override

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import without_external
from checkpointless.callbacks.step_recorder import loss_of
from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.megatron import cleanup as megatron_cleanup
from checkpointless.megatron.update import GuardedUpdate
from checkpointless.recovery import CheckpointManager, PEFTCheckpointManager
from checkpointless.recovery.guard import vote
from checkpointless.strategies import chatter, cleanup, one_logger
from checkpointless.strategies.connector import CheckpointlessCompatibleConnector
from checkpointless.strategies.live_state import InMemoryCheckpoint, TrainerLiveState, samples_per_step
from checkpointless.strategies.peft import StateBeforeAdapters, peft_of, trained_names
from checkpointless.strategies.phases import PhasedIterator, announce_gradient_sync
from checkpointless.strategies.progress import StepBoundary
from checkpointless.strategies.worker_streams import WorkerSeed, repeat_worker_draws
from checkpointless.telemetry.events import event_log

logger = logging.getLogger(__name__)


class CheckpointlessMegatronStrategy(MegatronStrategy):
    """``MegatronStrategy`` that recovers from a fault without a checkpoint.

    Used inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper`, it finds the running wrapper
    and installs the rest: checkpoint manager, checkpoint connector, the guard around the optimizer update, and the
    clean-up of Megatron's and NeMo's globals. Outside of such a function it is ``MegatronStrategy``.

    Args:
        *args: as for ``MegatronStrategy``.
        num_distributed_optimizer_instances: how many replicas of the optimizer's shards there are. Default 2
            (``MegatronStrategy``: 1); with 1 a rank that dies can only be replaced from storage.
        **kwargs: as for ``MegatronStrategy``.

    Attributes:
        base_store: the store on which the process groups were built, or None before.
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
        self._records_steps = False
        self._worker_seed = WorkerSeed()
        if self._call is None:
            logger.warning("no HPWrapper is active: this run has no in-process recovery")
            return
        # Without a distributed optimizer every data-parallel rank holds all of its shard.
        sharded = getattr(self.ddp_config, "use_distributed_optimizer", True)
        if num_distributed_optimizer_instances < 2 and sharded:
            logger.warning("one optimizer instance: a rank that dies cannot be restored from memory")
        self._fault_injection = HPFaultInjectionCallback.from_environment()
        megatron_cleanup.install()
        cleanup.install()
        chatter.install()
        one_logger.install()
        if self._call.generation > 0:  # also in a new process, which has said nothing yet
            chatter.quiet()

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        """Keeps the state of this rank over restarts; None where recovery is switched off."""
        return self._manager

    def get_wrapper(self) -> HPCallWrapper | None:
        """The wrapper whose block this strategy runs in."""
        return self._call

    def is_peft(self) -> bool:
        """Whether a PEFT callback is among the trainer's."""
        return peft_of(self.trainer) is not None

    @property
    def awaits_adapters(self) -> bool:
        """Whether NeMo has still to add the adapters of a PEFT run; without them there is no optimizer either."""
        return self._awaits_adapters

    def live_state(self) -> TrainerLiveState:
        """The state of the running trainer; before the adapters are added, that of the base model.

        Raises:
            RuntimeError: the strategy was not set up.
        """
        if self._awaits_adapters:
            return StateBeforeAdapters(self.trainer)
        if self._live is None:
            raise RuntimeError("the strategy has no state before setup()")
        return self._live

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
        if call is None or not (self.optimizers or self._awaits_adapters):
            return
        call.beat()
        self._add_callbacks(trainer)
        for part in (call.wrapper.abort, call.wrapper.finalize):
            register = getattr(part, "register_attributes", None)
            if register is not None:
                register(trainer)
        if trainer.max_epochs is not None and trainer.max_epochs > 1:
            logger.warning(
                "max_epochs=%d: a run that is recovered in a later epoch is not bit-identical yet",
                trainer.max_epochs,
            )
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector.adopt(trainer._checkpoint_connector)
        callback = next(each for each in _callbacks(trainer) if isinstance(each, CheckpointlessCallback))
        call.restart_in_process = callback.enable_inprocess
        if callback.enable_checkpointless:
            if call.checkpoint_manager is None:
                call.checkpoint_manager = PEFTCheckpointManager() if self._awaits_adapters else CheckpointManager()
            self._manager = call.checkpoint_manager
            if callback.enable_checksum:
                self._manager.enable_checksum = True
        if not self._awaits_adapters:
            self._guard(trainer, call)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Set up the optimizers. In a PEFT run NeMo does it late, when it has added the adapters."""
        super().setup_optimizers(trainer)
        if self._awaits_adapters and self._call is not None:
            self._awaits_adapters = False
            self._guard(trainer, self._call)

    @override
    def selective_restore(self) -> None:
        """Load what NeMo's ``restore_config`` asks for, the weights of a pretrained model for example.

        After a fault memory is asked first; :meth:`restore_from_storage` is called if that was in vain.
        """
        call = self._call
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        self._put_off_restore = fitting and call is not None and call.generation > 0
        if not self._put_off_restore:
            super().selective_restore()

    def restore_from_storage(self) -> None:
        """Do what :meth:`selective_restore` put off."""
        if self._put_off_restore:
            self._put_off_restore = False
            super().selective_restore()

    def add_adapters(self) -> None:
        """Have NeMo add the adapters of a PEFT run and set up the optimizer now, not when the first epoch begins.

        For a restart from memory, which needs them in their place. Their initial values are overwritten then.
        """
        peft = peft_of(self.trainer)
        if self._awaits_adapters and peft is not None:
            peft.apply_transform(self.trainer)
            self.adapters_added(peft.params_to_save)

    def adapters_added(self, params_to_save: Iterable[str]) -> None:
        """The adapters are in their place and have their values, unless memory is about to give them those.

        Args:
            params_to_save: the names of what NeMo saves as adapters.
        """
        manager = self._manager
        if manager is None or self._live is None:
            return
        if isinstance(manager, PEFTCheckpointManager):
            manager.params_to_save = {*params_to_save, *trained_names(self.megatron_parallel)}
        if self._restored_without_adapters:
            self._restored_without_adapters = False
            manager.store_rng_states(self.trainer.global_step, at_batch_start=True)
            vote()  # who is attached can be recovered from: by then every rank's streams are on its board
            manager.attach(self._live, self.trainer.global_step)

    def rebuilt(self) -> None:
        """Everything is built anew and waits for its state."""
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
        """The state is whole: from memory, from storage, or that of a new job."""
        call = self._call
        if call is None or self._manager is None:
            return
        self._worker_seed.agree(self._manager.rng_of(self.trainer.global_step))
        if self._awaits_adapters:
            self._restored_without_adapters = True
        else:
            self._manager.attach(self.live_state(), self.trainer.global_step)
        call.begin_data(samples_per_step(self.trainer))

    @override
    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        """Deal the samples out to the ranks, and make what workers draw independent of faults."""
        loader = super().process_dataloader(dataloader)
        if self._worker_seed.value is not None:
            repeat_worker_draws(loader, self._worker_seed.value, self.trainer)
        return loader

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, unless recovery has put it in place already.

        Args:
            checkpoint: a checkpoint.
            strict: whether its keys must match the model's.
        """
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any], selective_restore: bool = False) -> None:
        """Load the optimizer, unless recovery has put it in place already."""
        if not isinstance(checkpoint, InMemoryCheckpoint):
            super().load_optimizer_state_dict(checkpoint, selective_restore=selective_restore)

    def on_train_start(self) -> None:
        """The loop starts: streams that were taken before the next batch was asked for are put back here."""
        chatter.speak()
        if self._call is not None:
            announce_gradient_sync(get_model_config(self.megatron_parallel[0]), self._call)
        if self._manager is not None:
            self._manager.restore_rng_at(batch_start=False)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A step begins: take note of where the loop and the random streams stand."""
        super().on_train_batch_start(batch, batch_idx)
        if self._manager is not None and self._live is not None:
            step = self.trainer.global_step
            self._manager.restore_rng_at(batch_start=True)
            self._live.boundary = StepBoundary.take(self.trainer, step + 1)
            self._manager.store_rng_states(step, at_batch_start=True)

    @override
    def training_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one training step."""
        call = self._call
        if call is not None:
            dataloader_iter = PhasedIterator.around(dataloader_iter, call)
        output = super().training_step(dataloader_iter, *args, **kwargs)
        if call is not None and self._records_steps:
            call.making_loss = loss_of(output)
        return output

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one optimizer step; one that the gradient scaler skipped counts as committed too."""
        output = super().optimizer_step(*args, **kwargs)
        call = self._call
        if call is not None and self._manager is not None:
            lock = call.parameter_update_lock
            if lock.committed < call.making_step:
                self._manager.store_rng_states(call.making_step, loss=call.making_loss)
                self._manager.replicate_rng_states(call.making_step)
                with lock.update(call.making_step):
                    pass
                call.committed(call.making_step)
        return output

    @override
    def teardown(self) -> None:
        """Leave the state alone if a fault ended the run: clean-up is the abort's and the finalizer's."""
        trainer = getattr(self, "trainer", None)  # none if the fault came before setup()
        if self._call is not None and (trainer is None or trainer.interrupted):
            if hasattr(self, "megatron_parallel"):
                self.megatron_parallel.teardown_ddp()
            return
        super().teardown()

    def _guard(self, trainer: pl.Trainer, call: HPCallWrapper) -> None:
        """Model and optimizer are built: take hold of them, and guard the update."""
        self._live = TrainerLiveState(trainer)
        GuardedUpdate(
            self.optimizers[0].mcore_optimizer,
            lock=call.parameter_update_lock,
            step=lambda: call.making_step,
            ready=self._gradients_are_final,
            committed=call.committed,
            phase=call.enter_phase,
        )

    def _add_callbacks(self, trainer: pl.Trainer) -> None:
        """Add the callbacks that are asked for by environment or missing; they missed their ``setup`` hook."""
        present = _callbacks(trainer)
        present[:] = without_external(present)
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
        self._records_steps = any(isinstance(callback, StepRecorder) for callback in present)

    def _gradients_are_final(self, step: int) -> None:
        call = self._call
        if call is None:
            return
        call.enter_phase("before_optimizer", step)
        if self._manager is not None:
            self._manager.store_rng_states(step, loss=call.making_loss)
            self._manager.replicate_rng_states(step)
        call.parameter_update_lock.mark_ready(step)


def _callbacks(trainer: Any) -> list[Any]:
    """The trainer's own list of callbacks."""
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def _signature() -> inspect.Signature:
    """That of ``MegatronStrategy`` with our default: editors show it, and NeMo-Run's configurations go by it."""
    name = "num_distributed_optimizer_instances"
    default = inspect.signature(CheckpointlessMegatronStrategy.__init__).parameters[name].default
    theirs = inspect.signature(MegatronStrategy)
    parameters = {**theirs.parameters, name: theirs.parameters[name].replace(default=default)}
    return theirs.replace(parameters=list(parameters.values()))


CheckpointlessMegatronStrategy.__signature__ = _signature()  # type: ignore[attr-defined]
