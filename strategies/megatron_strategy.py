"""NeMo's Megatron strategy with recovery from living replicas."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.strategies import MegatronStrategy
from torch.utils.data import DataLoader
from typing_extensions import override

from checkpointless.callbacks.step_recorder import loss_of
from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.inprocess.communicators import launch_bound
from checkpointless.megatron import cleanup as megatron_cleanup
from checkpointless.recovery import CheckpointManager
from checkpointless.recovery.running import manager_of
from checkpointless.strategies.block.callbacks import complete
from checkpointless.strategies.block.phases import PhasedIterator, announce_gradient_sync
from checkpointless.strategies.block.rebuild import Rebuild
from checkpointless.strategies.boundary.kinds import InMemoryCheckpoint
from checkpointless.strategies.boundary.live_state import TrainerLiveState
from checkpointless.strategies.boundary.loops import make_resumable
from checkpointless.strategies.boundary.megatron_steps import KeptReduction, MegatronSteps
from checkpointless.strategies.boundary.peft import StateBeforeAdapters, peft_of, trained_names
from checkpointless.strategies.boundary.restoration import skip_fit
from checkpointless.strategies.checkpoints import callbacks as checkpoint_callbacks
from checkpointless.strategies.checkpoints.background import PendingSaves
from checkpointless.strategies.checkpoints.connector import CheckpointlessCompatibleConnector
from checkpointless.strategies.checkpoints.copies import loading_from_copies
from checkpointless.strategies.checkpoints.failed_saves import FailedSaves
from checkpointless.strategies.checkpoints.saves import Saves
from checkpointless.strategies.checkpoints.unfinished import leave_unfinished, remove_whole, wait_for_removals
from checkpointless.strategies.data.training import TrainingData
from checkpointless.strategies.data.worker_streams import WorkerSeed, repeat_worker_draws
from checkpointless.strategies.frameworks import chatter, cleanup, entry_points, one_logger
from checkpointless.strategies.frameworks.logger_facts import LoggerFacts
from checkpointless.strategies.recoverable_fit import RecoverableFit, begin_manager

logger = logging.getLogger(__name__)


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
        failed_saves_end_job: whether a checkpoint that cannot be saved ends the job. Default: False; a warning says
            why, training goes on, and the next checkpoint that is due is made.
        **kwargs: the keyword arguments of ``MegatronStrategy``.

    Attributes:
        base_store: the store on which the process groups were built; None before that.
    """

    def __init__(
        self,
        *args: Any,
        num_distributed_optimizer_instances: int = 2,
        failed_saves_end_job: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, num_distributed_optimizer_instances=num_distributed_optimizer_instances, **kwargs)
        self.failed_saves_end_job = failed_saves_end_job
        self.base_store: dist.Store | None = None
        self._call = active_call_wrapper()
        self._rebuild = Rebuild(self._call) if self._call is not None else None
        self._fit: RecoverableFit | None = None  # the newest one that was set up inside a block
        self._awaits_adapters = False
        self._put_off_restore = False
        self._data = TrainingData()
        self._worker_seed = WorkerSeed()
        if self._call is None:
            logger.warning("no HPWrapper is active: this run has no in-process recovery")
            return
        # Without the distributed optimizer all data-parallel ranks hold the same optimizer state.
        sharded = getattr(self.ddp_config, "use_distributed_optimizer", True)
        if num_distributed_optimizer_instances < 2 and sharded:
            logger.warning("one optimizer instance: a rank that dies cannot be restored from memory")
        megatron_cleanup.install()
        cleanup.install()
        chatter.install()
        one_logger.install()
        entry_points.install()
        checkpoint_callbacks.install()
        if self._call.generation > 0:  # also in a new process, which has logged nothing yet
            chatter.quiet()

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
        live = self._fit.live if self._fit is not None else None
        if live is None:
            raise RuntimeError("the strategy has no state before setup()")
        return live

    @override
    def setup_environment(self) -> None:
        """Set up the process groups, and make new loggers continue where the old ones were."""
        super().setup_environment()
        call, trainer = self._call, self.lightning_module.trainer if self.lightning_module is not None else None
        if call is None or call.generation == 0 or trainer is None:
            return
        wait_for_removals()
        manager = manager_of(call)
        leave_unfinished(manager is not None and manager.saves is not None and manager.saves.pending is not None)
        LoggerFacts(trainer, call.facts).write_on((manager.fit if manager is not None else 0) + 1)

    @override
    def setup_distributed(self) -> None:
        """Build the process groups of this generation."""
        if self._rebuild is None:
            super().setup_distributed()
            return
        with self._rebuild.process_groups():
            super().setup_distributed()
        self.base_store = dist.distributed_c10d._get_default_store()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up model and optimizer, and install what recovery needs.

        Args:
            trainer: the trainer.
        """
        super().setup(trainer)
        call = self._call
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._awaits_adapters = fitting and not self.optimizers and self.is_peft()
        if call is None or not fitting or not (self.optimizers or self._awaits_adapters):
            return
        call.beat()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callback = complete(callbacks)
        for part in (call.wrapper.abort, call.wrapper.finalize):
            register = getattr(part, "register_attributes", None)
            if register is not None:
                register(trainer)
        manager = begin_manager(call, callback, self._awaits_adapters, Saves)
        if manager is not None:
            manager.saves.failed.end_job = self.failed_saves_end_job
        self._fit = RecoverableFit(trainer, call, manager, self._data, self._worker_seed)
        make_resumable(trainer, self._fit)
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector.adopt(trainer._checkpoint_connector)
        if not self._awaits_adapters:
            self._take_hold()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Set up the optimizers. In a PEFT run NeMo does this late, after it has added the adapters."""
        super().setup_optimizers(trainer)
        if self._awaits_adapters and self._fit is not None:
            self._awaits_adapters = False
            self._take_hold()

    def _take_hold(self) -> None:
        """Take hold of model and optimizer, which are built."""
        assert self._fit is not None
        fit = self._fit
        fit.take_hold(MegatronSteps(self.trainer, lambda: fit.position().fetched))
        self._bound_launches()

    def _bound_launches(self) -> None:
        """Keep launches from running far ahead of the GPU, unless layers are captured in graphs."""
        config = get_model_config(self.megatron_parallel[0])
        graphs = getattr(config, "cuda_graph_impl", "none") != "none"
        graphs |= any(getattr(config, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
        bound = None if graphs else launch_bound.from_environment()
        if bound is not None:
            bound.watch(self.megatron_parallel)

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
        if self._fit is not None:
            self._fit.adapters_added({*params_to_save, *trained_names(self.megatron_parallel)})

    def keep_saves(self) -> None:
        """Keep, after a fault, the checkpoints that are being written in the background, to finish them later."""
        pending = PendingSaves.of(self._checkpoint_io)
        if pending is not None and self.checkpoint_manager is not None:
            self.checkpoint_manager.saves.pending = pending

    @property
    def failed_saves(self) -> FailedSaves | None:
        """What is done about saves that fail; None: there is no fit under way that could be recovered."""
        return self._fit.failed_saves if self._fit is not None else None

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint so that, whenever the process is killed, nothing half removed passes for one."""
        folder = Path(ckpt_to_dir(filepath))
        if not self.is_global_zero or self._call is None or "://" in str(filepath) or folder.is_symlink():
            super().remove_checkpoint(filepath)
        else:
            remove_whole(folder)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint, unless it was saved before a fault that makes the ranks pass this point once more."""
        save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        if self._fit is None or not self._fit.is_under_way:
            save()
            return
        finish = (storage_options or {}).get("finalize_fn")
        calls = getattr(self.checkpoint_io, "async_calls_queue", None)
        self._fit.save(str(filepath), calls, finish, save)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], selective_restore: bool = False
    ) -> dict[str, Any]:
        """Load a checkpoint; after a fault from copies of it, and each chunk that they lack from storage once."""
        load = partial(super().load_checkpoint, checkpoint_path, selective_restore)
        if self._call is None or self._call.generation == 0:
            return load()
        with loading_from_copies(self.checkpoint_io) as strategy:
            loaded = load()
        if strategy is not None and dist.get_rank() == 0:
            logger.warning("%s was loaded after a fault: %s", checkpoint_path, strategy.report)
        return loaded

    def rebuilt(self) -> None:
        """Record that everything is built anew and waits for its state."""
        if self._rebuild is not None:
            self._rebuild.end()

    def restored(self) -> None:
        """Prepare to train with the state, which is whole: from memory, from storage, or that of a new job."""
        if self._fit is not None:
            self._fit.restored()

    def skip_fit(self, objects: dict[str, Any] | None) -> dict[str, Any]:
        """Skip a fit that was over before the fault, which came in a later fit of the same block.

        Args:
            objects: the non-tensor state that the fit ended in; None if no rank knows it.

        Returns:
            The part of that state that Lightning loads.
        """
        return skip_fit(self.trainer, objects)

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        """Note that the tensors are in place, and keep the rest of the state.

        Args:
            objects: the rest of the state; what Lightning does not load is put back after Lightning has loaded its
                part.
        """
        assert self._fit is not None
        self._fit.restored_from_memory(objects)

    @override
    def process_dataloader(self, dataloader: DataLoader) -> DataLoader:
        """Distribute the samples to the ranks, and make what workers draw independent of faults."""
        if self._fit is not None:
            self._fit.loader_is_due()
        loader = super().process_dataloader(dataloader)
        if self._fit is not None:
            self._fit.loader_is_made(loader)
        if self._worker_seed.value is not None:
            repeat_worker_draws(
                loader, self._worker_seed.value, self.trainer, parallel_state.get_data_parallel_rank()
            )
        return loader

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
        call, replayed = self._call, self._fit.replayed if self._fit is not None else None
        if replayed is not None:
            return super().training_step(dataloader_iter, *args, loss_reduction=KeptReduction(replayed), **kwargs)
        if call is not None:
            dataloader_iter = PhasedIterator.around(dataloader_iter, call)
        output = super().training_step(dataloader_iter, *args, **kwargs)
        if call is not None:
            call.steps.loss = loss_of(output)
        return output

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one optimizer step, or replay what belongs to one without its update."""
        if self._fit is None:
            return super().optimizer_step(optimizer, *args, **kwargs)
        return self._fit.update(partial(super().optimizer_step, optimizer, *args, **kwargs))

    @override
    def teardown(self) -> None:
        """Tear down, but leave the state alone if a fault ended the run: abort and finalizer clean up then."""
        trainer = getattr(self, "trainer", None)  # missing if the fault came before setup()
        if self._call is not None and (trainer is None or trainer.interrupted):
            if hasattr(self, "megatron_parallel"):
                self.megatron_parallel.teardown_ddp()
            return
        fitted = trainer is None or trainer.state.fn == TrainerFn.FITTING
        if fitted and self._fit is not None:
            self._fit.finish()
        super().teardown()


def _signature() -> inspect.Signature:
    """Return the signature of ``MegatronStrategy`` with what is ours, which editors show and NeMo-Run relies on."""
    ours = inspect.signature(CheckpointlessMegatronStrategy.__init__).parameters
    theirs = inspect.signature(MegatronStrategy)
    name, more = "num_distributed_optimizer_instances", "failed_saves_end_job"
    parameters = {**theirs.parameters, name: theirs.parameters[name].replace(default=ours[name].default)}
    ends = [each for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    begins = [each for each in parameters.values() if each not in ends]
    return theirs.replace(parameters=[*begins, ours[more], *ends])


CheckpointlessMegatronStrategy.__signature__ = _signature()  # type: ignore[attr-defined]
