"""Lightning's strategies for torch optimizers, DDP and model-parallel, with recovery from living replicas."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from checkpointless.inprocess import UnrecoverableError
from checkpointless.inprocess.communicators import launch_bound
from checkpointless.integrations.lightning.boundary.torch_steps import TorchSteps
from checkpointless.integrations.lightning.frameworks import loggers
from checkpointless.integrations.lightning.recoverable_strategy import RecoverableStrategy, unfit
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.recovery.decide import Verdict
from checkpointless.state.port import SnapshotPoint
from checkpointless.transfer.exchange import all_gather_json

# --- Checkpoints that Lightning writes at once: those that ranks make again after a fault keep their names --------


class LightningSaves:
    """What a rank knows of the saves of its newest step; it outlives restarts.

    After a fault the ranks may go back to before a save. It is repeated then, under the same name: Lightning's
    callbacks would choose another one for a path that exists.

    Attributes:
        unfinished: the background saves whose end this rank has not gone through: there are none.
    """

    unfinished: tuple[()] = ()

    def __init__(self) -> None:
        self._made: list[
            tuple[str, tuple[int, SnapshotPoint]]
        ] = []  # paths, and the newest point when they were saved to
        self._again: set[str] = set()
        self._resumed_step = -1

    def save(self, path: str, after: tuple[int, SnapshotPoint], make: Callable[[], None]) -> None:
        """Make a save.

        Args:
            after: the newest point of this rank.
        """
        if after[0] != self._resumed_step:
            self._again = set()
        # This is noted first: a rank that is interrupted in the save may have written the file.
        self._made = [each for each in self._made if each[1][0] == after[0] and each[0] != path] + [(path, after)]
        make()
        self._again.discard(path)

    def agree(self, resumed_at: tuple[int, SnapshotPoint] | None, strategy: Strategy) -> None:
        """Agree with the other ranks on what is saved again. Collective.

        Args:
            resumed_at: the point that all ranks were brought to; None: the state is not from memory.
        """
        mine = [path for path, after in self._made if resumed_at is not None and after >= resumed_at]
        self._again = {path for each in all_gather_json(mine) for path in each}
        self._resumed_step = resumed_at[0] if resumed_at is not None else -1
        for each in _callbacks_of(strategy):
            if isinstance(each, Checkpoint) and hasattr(each, "file_exists"):
                vars(each).pop("file_exists", None)  # a callback from outside of the block has ours already
                if self._again:
                    each.file_exists = self._unless_again(each.file_exists)

    def _unless_again(self, exists: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: Any, trainer: Any) -> bool:
            # Ranks may name a file differently: the first of them decides, and every rank asks it.
            again = trainer.strategy.broadcast(str(filepath) in self._again)
            return exists(filepath, trainer) and not again

        return file_exists

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Do nothing: no save is lost."""

    def watch(self, strategy: Strategy) -> None:
        """Note what callbacks link to a checkpoint, too. Idempotent."""
        for each in _callbacks_of(strategy):
            if hasattr(each, "_link_checkpoint") and "_link_checkpoint" not in vars(each):
                vars(each)["_link_checkpoint"] = self._noting_links(each._link_checkpoint)

    def _noting_links(self, link: Callable[..., None]) -> Callable[..., None]:
        def link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
            if self._made:
                self._made.append((str(linkpath), self._made[-1][1]))
            link(trainer, filepath, linkpath)

        return link_checkpoint

    def let_go(self, trainer: object) -> None:
        """Do nothing: no save outlasts the trainer."""


def _callbacks_of(strategy: Strategy) -> Iterable[Any]:
    """Return the callbacks of the trainer that ``strategy`` belongs to."""
    trainer: Any = strategy.lightning_module.trainer if strategy.lightning_module is not None else None
    return trainer.callbacks if trainer is not None else ()


logger = logging.getLogger(__name__)

_wrappers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)  # of modules that were wrapped in this process: one from outside of the block is wrapped again after a fault


class _TorchRecoverable(RecoverableStrategy):
    """What Lightning's own strategies need to recover: torch optimizers, Lightning's data, saves made at once."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """After a fault memory is asked first, for which optimizers have to be set up."""
        after_a_fault = self._call is not None and self._call.generation > 0
        return after_a_fault or bool(super().restore_checkpoint_after_setup)

    @override
    def setup_environment(self) -> None:
        """Set up the process groups, and make new loggers continue where the old ones were."""
        super().setup_environment()
        self._resume_loggers()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up model and optimizer, and install what recovery needs.

        Raises:
            UnrecoverableError: the training cannot be recovered exactly; the message says what to change.
        """
        call = self._call
        fitting = trainer.state.fn == TrainerFn.FITTING and call is not None
        if fitting:
            self._refuse(trainer, before=True)
        super().setup(trainer)
        self.trainer = trainer
        if call is None or not fitting:
            return
        self._refuse(trainer, before=False)
        self._begin_fit(trainer, LightningSaves, announces=True).take_hold(TorchSteps(trainer, call))
        bound = launch_bound.from_environment()
        if bound is not None:
            assert self.model is not None
            bound.watch(self.model)

    def _refuse(self, trainer: pl.Trainer, before: bool) -> None:
        """Refuse what could not be recovered exactly.

        Args:
            trainer: the trainer.
            before: whether model and optimizers are still to be set up.
        """
        reason = self._unfit_before(trainer) if before else self._unfit(trainer)
        if reason is not None:
            raise UnrecoverableError(reason)

    def _unfit_before(self, trainer: pl.Trainer) -> str | None:
        if not trainer.lightning_module.automatic_optimization:
            return (
                "checkpointless cannot go on within a training_step, which updates by itself in manual "
                "optimization: leave out automatic_optimization=False (several optimizers: one with several param "
                "groups)"
            )
        return unfit(trainer.callbacks)  # type: ignore[attr-defined]

    def _unfit(self, trainer: pl.Trainer) -> str | None:
        if len(self.optimizers) != 1:
            return f"checkpointless needs one optimizer, and configure_optimizers returns {len(self.optimizers)}"
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and type(scaler).update is not torch.amp.GradScaler.update:
            return f"checkpointless does not know how {type(scaler).__name__} changes its scale: use torch.amp's"
        if scaler is not None and getattr(self.optimizers[0], "_step_supports_amp_scaling", False):
            return "checkpointless cannot repeat an update that unscales gradients itself: leave out fused=True"
        return None

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one training step."""
        if self._call is not None:
            repeated_steps.take(self._call.steps.making, args)
            self._call.enter_phase("forward", self._call.steps.making)
        return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one optimizer step, or replay what belongs to one without its update."""
        if self._fit is None:
            return super().optimizer_step(*args, **kwargs)
        return self._fit.update(partial(super().optimizer_step, *args, **kwargs))

    @override
    def _data_rank(self) -> int:
        return int(self.distributed_sampler_kwargs["rank"])

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; after a fault that makes the ranks pass this point once more, under the same name."""
        save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        if self.is_left:
            logger.warning("%s is not saved: a fault is being handled", filepath)
        elif self._fit is None:
            save()
        else:
            self._fit.save(str(filepath), save)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, but not while a fault is being handled."""
        if not self.is_left:
            super().barrier(name)  # type: ignore[safe-super]

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state; nothing of it while a fault is being handled."""
        state: dict[str, Any] = {} if self.is_left else super().lightning_module_state_dict()
        return state

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state; nothing of it while a fault is being handled."""
        state: dict[str, Any] = {} if self.is_left else super().optimizer_state(optimizer)
        return state

    def on_train_start(self) -> None:
        """Let the frameworks log again."""
        loggers.speak()

    @override
    def teardown(self) -> None:
        """Tear down, but leave the state alone if a fault ended the run: abort and finalizer clean up then."""
        if self._finish_fit():
            super().teardown()


class CheckpointlessDDPStrategy(_TorchRecoverable, DDPStrategy):
    """Lightning's ``DDPStrategy`` that recovers from a fault without a checkpoint.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper` it finds the running wrapper and
    installs the rest. Elsewhere it behaves as ``DDPStrategy`` does with the same arguments. Each rank holds
    everything, so a rank that dies is filled by any other.

    Args:
        *args: the positional arguments of ``DDPStrategy``.
        **options: the keyword arguments of ``DDPStrategy``.
    """

    @override
    def setup_distributed(self) -> None:
        """Build the process groups of this generation."""
        self._build_groups(super().setup_distributed)

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        if self._call is None:
            return super()._setup_model(model)
        last = _wrappers[model]() if model in _wrappers else None
        if last is not None:  # an update that is still to be made may refer to it
            last._remove_autograd_hooks()
        del last
        given = self._ddp_kwargs
        if not self._call.is_first:  # DDP would write the first rank's weights over what this rank holds
            self._ddp_kwargs = {**given, "init_sync": False}
        wrapper = super()._setup_model(model)
        self._ddp_kwargs = given
        _wrappers[model] = weakref.ref(wrapper)
        return wrapper

    @override
    def restored(self) -> None:
        """Prepare to train; if memory has given no weights after a fault, with those of the first rank."""
        call, manager = self._call, self.checkpoint_manager
        is_from_memory = manager is not None and (manager.resumed_at or manager.verdict is Verdict.SKIP)
        if call is not None and not call.is_first and not is_from_memory:
            assert self.model is not None
            for each in [*self.model.parameters(), *self.model.buffers()]:
                dist.broadcast(each.detach(), 0)
        super().restored()

    @override
    def _unfit_before(self, trainer: pl.Trainer) -> str | None:
        if self._ddp_comm_state is not None or self._ddp_comm_wrapper is not None or self._model_averaging_period:
            return (
                "checkpointless does not know what a DDP communication hook keeps from step to step: leave out "
                "ddp_comm_state, ddp_comm_wrapper and model_averaging_period"
            )
        return super()._unfit_before(trainer)


class CheckpointlessModelParallelStrategy(_TorchRecoverable, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2, HSDP, tensor parallelism by a plan) that recovers from a fault.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper` it finds the running wrapper and
    installs the rest. Elsewhere it behaves as ``ModelParallelStrategy`` does with the same arguments. A rank that
    dies is filled by one that holds the same shards: HSDP has such ranks.

    The mesh that ``configure_model`` finds as ``self.device_mesh`` has the dimensions ``data_parallel`` and
    ``tensor_parallel``. With ``replicas``, ``self.device_mesh["data_parallel"]`` is replaced by two dimensions:
    give ``self.device_mesh["replicate", "shard"]`` to ``fully_shard``.

    Args:
        *args: positional arguments of ``ModelParallelStrategy``.
        replicas: how many times each shard is held (HSDP). Default: 1, with which a rank that dies
            cannot be restored from memory.
        **options: keyword arguments of ``ModelParallelStrategy``.
    """

    def __init__(self, *args: Any, replicas: int = 1, **options: Any) -> None:
        super().__init__(*args, **options)
        if replicas < 1:
            raise ValueError(f"replicas is {replicas}, and has to be 1 or more")
        self._replicas = replicas

    @override
    def _setup_distributed(self) -> None:
        self._build_groups(super()._setup_distributed)

    @override
    def setup_environment(self) -> None:
        """Set up the process groups and the mesh."""
        super().setup_environment()
        if self._replicas == 1:
            return
        size = self.device_mesh["data_parallel"].size()
        if size % self._replicas:
            raise UnrecoverableError(
                f"replicas={self._replicas} does not divide data_parallel_size={size}, which is the number of "
                "nodes if it is not given: for HSDP without tensor parallelism, give "
                f"data_parallel_size={dist.get_world_size()} and tensor_parallel_size=1"
            )
        names = ("replicate", "shard", "tensor_parallel")
        shape = (self._replicas, size // self._replicas, self.device_mesh["tensor_parallel"].size())
        mesh = dist.device_mesh.init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        assert self.lightning_module is not None
        self._device_mesh = self.lightning_module._device_mesh = mesh

    @override
    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients. The phase is announced here: FSDP2 computes with other tensors than its parameters."""
        if self._call is not None:
            self._call.enter_phase("backward", self._call.steps.making)
        return super().backward(closure_loss, *args, **kwargs)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data this rank trains on."""
        if self._replicas == 1:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        replica, shard, _ = self.device_mesh.get_coordinate() or (0, 0, 0)
        _, shards, _ = self.device_mesh.mesh.shape
        return {"num_replicas": self._replicas * shards, "rank": replica * shards + shard}
