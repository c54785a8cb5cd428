"""Lightning's strategies for torch optimizers, DDP and model-parallel, with recovery from living replicas."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from checkpointless.callbacks.step_recorder import loss_of
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.inprocess.communicators import launch_bound
from checkpointless.integrations.compat.lightning import AutomaticOptimization, without_zero_grad
from checkpointless.integrations.lightning.boundary.epoch_metrics import keep_metrics, unseen
from checkpointless.integrations.lightning.boundary.step_keeper import StepOutcome, take_state
from checkpointless.integrations.lightning.checkpoints.connector import keep_names
from checkpointless.integrations.lightning.recoverable_strategy import RecoverableStrategy
from checkpointless.integrations.torch.gradient_check import GradientCheck, unreduced
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.integrations.torch.torch_tensors import TorchTensors
from checkpointless.recovery.decide import Verdict
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Later
from checkpointless.transfer.exchange import all_gather_json

# --- Checkpoints that Lightning writes at once: those that ranks make again after a fault keep their names --------


_Point = tuple[int, SnapshotPoint]


class _LightningSaves:
    """The saves of the newest step, repeated under the same names after a fault; it outlives restarts."""

    unfinished: tuple[()] = ()  # saves in the background, of which there are none

    def __init__(self) -> None:
        self._made: list[tuple[str, _Point]] = []  # paths, and the newest point when they were saved to
        self._again: set[str] = set()
        self._resumed_step = -1

    def save(self, path: str, after: _Point, make: Callable[[], None]) -> None:
        if after[0] != self._resumed_step:
            self._again.clear()
        # This is noted first: a rank that is interrupted in the save may have written the file.
        self._made = [each for each in self._made if each[1][0] == after[0] and each[0] != path] + [(path, after)]
        make()
        self._again.discard(path)

    def agree(self, resumed_at: _Point | None, strategy: Any) -> None:
        """Agree with the other ranks on what is saved again after that point (None: all). Collective."""
        mine = [path for path, after in self._made if resumed_at is not None and after >= resumed_at]
        self._again = {path for each in all_gather_json(mine) for path in each}
        self._resumed_step = resumed_at[0] if resumed_at is not None else -1
        keep_names(strategy.trainer.callbacks, self._again)

    def forget_lost(self, callbacks: Iterable[Any]) -> None:
        """Do nothing: no save is lost."""

    def watch(self, strategy: Any) -> None:
        """Note what callbacks link to a checkpoint, too. Idempotent."""
        for each in strategy.trainer.callbacks:
            if hasattr(each, "_link_checkpoint") and "_link_checkpoint" not in vars(each):
                vars(each)["_link_checkpoint"] = partial(self._link, each._link_checkpoint)

    def _link(self, link: Callable[..., None], trainer: Any, filepath: str, linkpath: str) -> None:
        if self._made:
            self._made.append((str(linkpath), self._made[-1][1]))
        link(trainer, filepath, linkpath)

    def let_go(self, trainer: object) -> None:
        """Do nothing: no save outlasts the trainer."""


logger = logging.getLogger(__name__)

#: Of modules that were wrapped in this process: one from outside of the block is wrapped again after a fault.
_wrappers: weakref.WeakKeyDictionary[Any, weakref.ref[DistributedDataParallel]] = weakref.WeakKeyDictionary()


class _TorchRecoverable(RecoverableStrategy):
    """What Lightning's own strategies need to recover: torch optimizers, Lightning's data, saves made at once."""

    def __init__(self, *args: Any, sdc_check_every: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sdc_check_every = sdc_check_every

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """After a fault memory is asked first, for which optimizers have to be set up."""
        after_a_fault = self._call is not None and self._call.generation > 0
        return after_a_fault or bool(super().restore_checkpoint_after_setup)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._resume_loggers()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up model and optimizer, and install what recovery needs, or refuse what cannot be exact."""
        call = self._call
        fitting = trainer.state.fn == TrainerFn.FITTING and call is not None
        if fitting:
            self._refuse_before(trainer)
        super().setup(trainer)
        self.trainer = trainer
        if call is None or not fitting:
            return
        self._refuse(trainer)
        self._begin_fit(trainer, _LightningSaves, announces=True).take_hold(
            _TorchSteps(trainer, call, self._sdc_check_every)
        )
        bound = launch_bound.from_environment()
        if bound is not None:
            assert self.model is not None
            bound.watch(self.model)

    def _refuse_before(self, trainer: pl.Trainer) -> None:
        if not trainer.lightning_module.automatic_optimization:
            raise UnrecoverableError(
                "checkpointless cannot go on within a training_step, which updates by itself in manual "
                "optimization: leave out automatic_optimization=False (several optimizers: one with several param "
                "groups)"
            )

    def _refuse(self, trainer: pl.Trainer) -> None:
        reason, scaler = "", getattr(trainer.precision_plugin, "scaler", None)
        if len(self.optimizers) != 1:
            reason = f"checkpointless needs one optimizer, and configure_optimizers returns {len(self.optimizers)}"
        elif scaler is not None and type(scaler).update is not torch.amp.GradScaler.update:
            reason = f"checkpointless does not know how {type(scaler).__name__} changes its scale: use torch.amp's"
        elif scaler is not None and getattr(self.optimizers[0], "_step_supports_amp_scaling", False):
            reason = "checkpointless cannot repeat an update that unscales gradients itself: leave out fused=True"
        if reason:
            raise UnrecoverableError(reason)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is not None:
            repeated_steps.take(self._call.steps.making, args)
            self._call.enter_phase("forward", self._call.steps.making)
        return super().training_step(*args, **kwargs)

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
        state: dict[str, Any] = {} if self.is_left else super().optimizer_state(optimizer)
        return state

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
        sdc_check_every: in every so many steps, and in the first of a generation, the last batch's
            ``training_step`` and backward pass run once more, to find gradients that a device computes wrongly
            (:class:`~checkpointless.PlainTraining`). What the module logs and its attributes stay as they were
            after the first run, and callbacks are not called. None: never.
        **options: the keyword arguments of ``DDPStrategy``.
    """

    @override
    def setup_distributed(self) -> None:
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
    def _refuse_before(self, trainer: pl.Trainer) -> None:
        if self._ddp_comm_state is not None or self._ddp_comm_wrapper is not None or self._model_averaging_period:
            raise UnrecoverableError(
                "checkpointless does not know what a DDP communication hook keeps from step to step: leave out "
                "ddp_comm_state, ddp_comm_wrapper and model_averaging_period"
            )
        super()._refuse_before(trainer)


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
        sdc_check_every: as for :class:`CheckpointlessDDPStrategy`; it is refused with sharded parameters.
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
        if self._replicas == 1:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        replica, shard, _ = self.device_mesh.get_coordinate() or (0, 0, 0)
        _, shards, _ = self.device_mesh.mesh.shape
        return {"num_replicas": self._replicas * shards, "rank": replica * shards + shard}


# --- Steps as Lightning makes them with a torch optimizer: guarded, noted, and replayed without computing anything

_TWICE = (
    "the module's optimizer_step() updates more than once in a step; one update of a step can be guarded: let it "
    "call optimizer.step() once"
)
_ANOTHER = (
    "the trainer has another optimizer than at the beginning, which a replaced rank does not have: let "
    "configure_optimizers return the one that is used to the end"
)
_WITHIN = (
    "accumulate_grad_batches was changed to {} within the batches of a step, or one of them was None: Lightning "
    "sets gradients to zero at batches whose number is a multiple of it, and batch {} {}. Change it at the "
    "beginning of an epoch, or behind a number of batches that the old and the new value divide"
)
_PLUGIN = "precision"


class _TorchSteps:
    """How Lightning makes steps in automatic optimization: the closure first, then vote and update in the lock."""

    def __init__(self, trainer: pl.Trainer, call: HPCallWrapper, sdc_check_every: int | None) -> None:
        strategy: Any = trainer.strategy
        self._trainer = trainer
        self._call = call
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self.tensors = TorchTensors([strategy.model], strategy.optimizers, is_known=call.high_water > 0)
        apart = [partial(unreduced, self.tensors), partial(unseen, trainer)]
        self.check = GradientCheck(
            sdc_check_every, self.tensors, call, apart=apart, keep=partial(keep_metrics, trainer)
        )
        self.tensors.arrange()
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        loop.__class__ = _ObservedOptimization
        loop.steps, loop.closure = self, None
        self._loop: _ObservedOptimization = loop
        self.replayed: StepOutcome | None = None
        self._guard: UpdateGuard | None = None
        self._is_updated = self._overflows = False
        self._accumulates = False if call.high_water > 0 else None  # whether gradients wait for more; None: unknown
        self._is_put_back = False
        self.put_back: Callable[[], None]
        self.done: Callable[[], None]

    def guard(self, guard: UpdateGuard) -> None:
        self._guard = guard

    # --- a step that is computed ----------------------------------------------------------------------------------

    def begin(self, batch_idx: int) -> None:
        """Begin the computation of a batch; refuse gradients of two steps that would be mixed, or be dropped."""
        self._is_updated = self._overflows = False
        every = self._trainer.accumulate_grad_batches
        if self.replayed is None and batch_idx and self._accumulates not in (None, bool(batch_idx % every)):
            what = "is within the step" if self._accumulates else "is the first of its step"
            raise UnrecoverableError(_WITHIN.format(every, batch_idx, what))

    def end(self) -> None:
        self._accumulates = self.replayed is None and not self._is_updated

    def update(self, make: Callable[[], object]) -> object:
        if self.replayed is not None:
            self._put_back_once()
            return None
        made = make()
        if not self._is_updated:  # gradients overflowed
            self._overflows = True
            self._update(lambda: None)
        return made

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Guard every ``step`` of the optimizer in the context, whoever calls it; it has to make one update."""
        if self.replayed is not None:
            yield
            self._put_back_once()
            return
        (optimizer,) = self.tensors.optimizers
        if self._trainer.strategy.optimizers[0] is not optimizer:
            raise UnrecoverableError(_ANOTHER)
        own = vars(optimizer).get("step")  # a scheduler's
        vars(optimizer)["step"] = partial(self._step, optimizer.step)
        try:
            yield
        finally:
            vars(optimizer).pop("step")
            if own is not None:
                vars(optimizer)["step"] = own
        if not self._is_updated:  # the module's optimizer_step() has left the update out
            self._overflows = True
            self._update(lambda: None)

    def _step(self, step: Callable[..., Any], closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Stand in for the optimizer's ``step``: gradients first, then the vote, then the update alone."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update(partial(step, **options))
        return loss

    def _update(self, update: Callable[[], Any]) -> None:
        assert self._guard is not None
        if self._is_updated:
            raise UnrecoverableError(_TWICE)

        def apply() -> None:
            with self.tensors.watched():
                update()

        self._guard(apply)
        self._is_updated = True

    def outcome(self, accumulated: Later[dict[str, Any]]) -> tuple[bool, Callable[[], dict[str, Any]]]:
        taken, overflows = take_state(self._trainer), self._overflows
        progress = self._loop.optim_progress.optimizer.zero_grad.state_dict()
        scaler = self._scaler.state_dict() if self._scaler is not None else None
        output = self._loop.output()
        if "loss" in output:
            self._call.steps.loss = loss_of(output)
        plain = _plain(output)

        def state() -> dict[str, Any]:
            made = taken()
            checkpoint = {**made["checkpoint"], "loops": progress}
            if scaler is not None:
                checkpoint[_PLUGIN] = scaler if overflows else _after_an_update(scaler)
            return {"checkpoint": checkpoint, "kinds": made["kinds"], "output": plain}

        return not overflows, lambda: vars(
            StepOutcome(None, True, 1, not overflows, None, None, accumulated(), state())
        )

    # --- a step that is replayed ----------------------------------------------------------------------------------

    def _put_back_once(self) -> None:
        if self._is_put_back:
            return
        self._is_put_back = True
        self.put_back()
        assert self.replayed is not None
        assert self.replayed.state is not None
        checkpoint = self.replayed.state["checkpoint"]
        self._loop.optim_progress.optimizer.zero_grad.load_state_dict(checkpoint["loops"])
        if self._scaler is not None:
            self._scaler.load_state_dict(checkpoint[_PLUGIN])
        self.done()


class _ObservedOptimization(AutomaticOptimization):
    """Lightning's automatic optimization of a batch, which reports to :class:`_TorchSteps` what it does."""

    steps: _TorchSteps
    closure: Closure | None  # computes the batch; None: it is replayed, or there was none

    @override
    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        self.steps.begin(batch_idx)
        output: dict[str, Any] = super().run(optimizer, batch_idx, kwargs)
        self.steps.end()
        return output

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        with self.steps.guarded():
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)

    @override
    def _make_closure(self, kwargs: Any, optimizer: torch.optim.Optimizer, batch_idx: int) -> Any:
        outcome = self.steps.replayed
        if outcome is not None:
            assert outcome.state is not None
            device = self.trainer.strategy.root_device
            return _KeptResult(move_data_to_device(outcome.state["output"], device))
        made = super()._make_closure(kwargs, optimizer, batch_idx)
        self.closure = made
        if not self.trainer.fit_loop._should_accumulate():
            self.closure = Closure(partial(self.steps.check.run, made.closure, without_zero_grad(made).closure))
        return self.closure

    def output(self) -> dict[str, Any]:
        """Return the output of the batch that was computed last; its tensors are not changed any more."""
        result: ClosureResult | None = getattr(self.closure, "_result", None)
        return result.asdict() if result is not None and result.loss is not None else {}


class _KeptResult:
    """Stands for the computation of a batch that is replayed."""

    def __init__(self, output: Any) -> None:
        self._output: dict[str, Any] = output

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self._output.get("loss")

    def consume_result(self) -> ClosureResult:
        extra = {name: value for name, value in self._output.items() if name != "loss"}
        return ClosureResult(self._output.get("loss"), extra)


def _plain(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a batch's output that another process could be given."""
    plain = {}
    for name, value in output.items():
        try:
            state_tree.check(value)
        except state_tree.StateTreeError:
            _warn_once(
                f"training_step returns {name}, which no other process could be given: after a fault right behind "
                "an update on_train_batch_end gets the output of that batch without it"
            )
        else:
            plain[name] = apply_to_collection(value, torch.Tensor, torch.Tensor.detach)
    return plain


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _after_an_update(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the ``state`` of a ``torch.amp.GradScaler`` is after an update without an overflow."""
    if not state:
        return {}
    scale = torch.tensor(state["scale"], dtype=torch.float32)
    tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32)
    factors = state["growth_factor"], state["backoff_factor"], state["growth_interval"]
    torch._amp_update_scale_(scale, tracker, torch.zeros(()), *factors)
    return {**state, "scale": float(scale), "_growth_tracker": int(tracker)}
