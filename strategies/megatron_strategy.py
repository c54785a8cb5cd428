"""NeMo's Megatron strategy with recovery from living replicas."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config
from nemo.collections.llm.gpt.model.base import GPTModel
from nemo.collections.llm.peft.lora import LoRA
from nemo.lightning import io
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.megatron_parallel import MegatronStep
from nemo.lightning.pytorch.callbacks import PEFT
from nemo.lightning.pytorch.strategies import MegatronStrategy
from typing_extensions import override

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.callbacks.step_recorder import loss_of
from checkpointless.inprocess import HPCallWrapper
from checkpointless.inprocess.communicators import launch_bound
from checkpointless.inprocess.communicators.launch_bound import LaunchBound
from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.inprocess.wrap import emit_event
from checkpointless.integrations.lightning.boundary.epoch_metrics import keep_metrics, unseen
from checkpointless.integrations.lightning.boundary.step_keeper import StepOutcome
from checkpointless.integrations.lightning.checkpoints import saves as checkpoint_callbacks
from checkpointless.integrations.lightning.checkpoints.saves import OnSaveError, Saves, begin_set_up, remove_whole
from checkpointless.integrations.lightning.frameworks import nemo
from checkpointless.integrations.lightning.frameworks.nemo import cache_megatron_datasets
from checkpointless.integrations.lightning.recoverable_strategy import RecoverableStrategy
from checkpointless.integrations.megatron import cleanup as megatron_cleanup
from checkpointless.integrations.megatron import cpu_platform
from checkpointless.integrations.megatron.state import MegatronTensors, replicas
from checkpointless.integrations.megatron.update import (
    GuardedUpdate,
    NotedNorms,
    announce_gradient_sync,
    check_contexts,
)
from checkpointless.integrations.megatron.warm import KeptModel, fingerprints
from checkpointless.integrations.torch.gradient_check import GradientCheck
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.recovery import CheckpointManager
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.recovery.manager import manager_of
from checkpointless.state.journal import FrontEnd, StepJournal
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization.state_tree import Later, copy_of
from checkpointless.transfer.exchange import true_on_all
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key

_TABLES = ("_parameters", "_buffers", "_modules")
_TRAINER = ("_trainer", "_fabric")  # of the generation that is over
logger = logging.getLogger(__name__)


class _BuildAnewError(RuntimeError):
    """Raised where a model was kept that must not be used; the block is entered once more, without it."""


class CheckpointlessMegatronStrategy(RecoverableStrategy, MegatronStrategy):
    """A ``MegatronStrategy`` that recovers from a fault without a checkpoint.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper`, it finds the running wrapper and
    installs the rest: checkpoint manager, checkpoint connector, the guard around the optimizer update, and the
    clean-up of Megatron's and NeMo's globals. Elsewhere it behaves like ``MegatronStrategy`` does
    with the same arguments.

    Args:
        *args: positional arguments of ``MegatronStrategy``.
        num_distributed_optimizer_instances: replicas of the optimizer's shards. With 1, a rank that dies is
            restored from storage only. Default: 2 (``MegatronStrategy``: 1).
        on_save_error: ``"continue"`` (default): a checkpoint that cannot be saved is removed, with a warning, and
            training continues. ``"raise"`` ends the job.
        warm: whether a surviving rank reuses its model, its optimizer and what its data module has built. Default:
            True. If False, all of it is rebuilt and takes over the state.
        sdc_check_every: in every so many steps, and in the first of a generation, the forward and backward passes
            of all micro-batches run once more, to find gradients that a device computes wrongly
            (:class:`~checkpointless.PlainTraining`). None: never.
        **kwargs: keyword arguments of ``MegatronStrategy``.

    Attributes:
        base_store: the store on which the process groups were built; None before that.
    """

    def __init__(
        self,
        *args: Any,
        num_distributed_optimizer_instances: int = 2,
        on_save_error: OnSaveError = "continue",
        warm: bool = True,
        sdc_check_every: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, num_distributed_optimizer_instances=num_distributed_optimizer_instances, **kwargs)
        if on_save_error not in get_args(OnSaveError):
            raise ValueError(f"on_save_error must be 'continue' or 'raise', not {on_save_error!r}")
        self.on_save_error = on_save_error
        self.base_store: dist.Store | None = None
        self.warm = warm
        self._sdc_check_every = sdc_check_every
        self._warm_start: _WarmStart | None = None
        self._put_off_restore = False
        if self._call is None:
            return
        # Without the distributed optimizer all data-parallel ranks hold the same optimizer state.
        sharded = getattr(self.ddp_config, "use_distributed_optimizer", True)
        if num_distributed_optimizer_instances < 2 and sharded:
            logger.warning("one optimizer instance: a rank that dies cannot be restored from memory")
        megatron_cleanup.install()
        nemo.install()
        checkpoint_callbacks.install()

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """Take the module of a trainer. What NeMo adds to it goes when the generation ends."""
        if self._call is not None:
            _note_given_module(model)
        super().connect(model)

    def is_peft(self) -> bool:
        """Return whether the trainer has a PEFT callback."""
        return CheckpointlessCallback.get_peft_callback(self.trainer) is not None

    @override
    def journal(self) -> StepJournal:
        """Return the journal of the running trainer; before the adapters are added, that of the base model."""
        if not self.awaits_adapters:
            return super().journal()
        manager = self.checkpoint_manager
        assert manager is not None
        distributed = bool(getattr(self.ddp_config, "use_distributed_optimizer", False))
        return StepJournal(_TensorsBeforeAdapters(self.megatron_parallel, distributed), manager, FrontEnd())

    @override
    def setup_environment(self) -> None:
        """Set up the process groups, and make new loggers continue where the old ones were."""
        if cpu_platform.installed():
            cpu_platform.install()  # it was installed before the script imported NeMo, which needs more of it
        super().setup_environment()
        call = self._call
        if call is not None and self.warm:
            cache_megatron_datasets()
        if call is None or call.generation == 0 or self.lightning_module is None:
            return
        manager = manager_of(call)
        begin_set_up(manager is not None and manager.saves is not None and bool(manager.saves.pending))
        self._resume_loggers()

    @override
    def setup_distributed(self) -> None:
        self._build_groups(super().setup_distributed)
        if self._call is None:
            return
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.base_store = store
        module = self.lightning_module
        self._warm_start = None
        if self.warm and module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            self._warm_start = _WarmStart(self)
            if self._call.generation > 0:
                self._warm_start.agree(manager_of(self._call))

    @override
    def setup_megatron_parallel(self, trainer: pl.Trainer) -> None:
        """Build model and optimizer, or take those that were kept over a fault."""
        with self._warm_start.build() if self._warm_start is not None else nullcontext():
            super().setup_megatron_parallel(trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up model and optimizer, and install what recovery needs."""
        super().setup(trainer)
        call = self._call
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.awaits_adapters = fitting and not self.optimizers and self.is_peft()
        if call is None or not fitting or not (self.optimizers or self.awaits_adapters):
            return
        manager = self._begin_fit(trainer, Saves, peft=self.awaits_adapters).manager
        if manager is not None:
            manager.saves.failed.on_error = self.on_save_error
        if not self.awaits_adapters:
            self._take_hold()

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Set up the optimizers. In a PEFT run NeMo does this late, after it has added the adapters."""
        super().setup_optimizers(trainer)
        if self.awaits_adapters and self._fit is not None:
            self.awaits_adapters = False
            self._take_hold()

    def require_anew(self, whole: bool) -> None:
        """Enter the block once more if a kept model must begin as a new one (``whole``: no adapters' load)."""
        warm, manager = self._warm_start, self.checkpoint_manager
        if warm is not None and warm.is_warm and (self.is_peft() or not (whole and self.ckpt_load_optimizer)):
            assert manager is not None
            manager.kept = None
            raise _BuildAnewError("memory does not suffice, and the model that was kept holds what was trained")

    def _take_hold(self) -> None:
        assert self._fit is not None
        fit = self._fit
        assert self._call is not None
        fit.take_hold(_MegatronSteps(self.trainer, self._call, self._sdc_check_every))
        bound = self._bound_launches()
        if fit.journal is not None and self._warm_start is not None:
            fit.journal.built = self._warm_start.built(bound)

    def _bound_launches(self) -> launch_bound.LaunchBound | None:
        """Keep launches from running far ahead of the GPU, unless layers are captured in graphs."""
        if self._warm_start is not None and self._warm_start.is_warm:  # the model has the hooks
            return self._warm_start.bound
        config = get_model_config(self.megatron_parallel[0])
        graphs = getattr(config, "cuda_graph_impl", "none") != "none"
        graphs |= any(getattr(config, name, False) for name in ("enable_cuda_graph", "external_cuda_graph"))
        bound = None if graphs else launch_bound.from_environment()
        if bound is not None:
            bound.watch(self.megatron_parallel)
        return bound

    @override
    def selective_restore(self) -> None:
        """Load what NeMo's ``restore_config`` asks for, or put it off until memory has refused."""
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
        """Make NeMo add the adapters of a PEFT run and set up the optimizer now, for memory to fill them."""
        peft = CheckpointlessCallback.get_peft_callback(self.trainer)
        if self.awaits_adapters and peft is not None:
            with self._warm_start.add_adapters(peft) if self._warm_start is not None else nullcontext():
                peft.apply_transform(self.trainer)
            self.adapters_added(peft.params_to_save)

    def adapters_added(self, params_to_save: Iterable[str]) -> None:
        """Note that the adapters, which NeMo saves under these names, are in place."""
        if self._fit is not None:
            self._fit.adapters_added({*params_to_save, *_trained_names(self.megatron_parallel)})

    def keep_saves(self) -> None:
        """Keep, after a fault, the checkpoints that are being written in the background, to finish them later."""
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.saves.keep_pending(self._checkpoint_io)

    @property
    def watched_saves(self) -> Saves | None:
        """The saves of the fit that is under way and could be recovered; None: there is none."""
        if self._fit is None or self._fit.manager is None or not self._fit.is_under_way:
            return None
        saves: Saves = self._fit.manager.saves
        return saves

    @override
    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint so that, whenever the process is killed, nothing half removed passes for one."""
        folder = Path(ckpt_to_dir(filepath))
        if not self.is_global_zero or self._call is None or "://" in str(filepath) or folder.is_symlink():
            super().remove_checkpoint(filepath)  # type: ignore[arg-type]  # NeMo's takes both
        else:
            remove_whole(folder)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint, unless it was saved before a fault that makes the ranks pass this point once more."""
        save = partial(super().save_checkpoint, checkpoint, filepath)  # type: ignore[arg-type]
        saves, calls = self.watched_saves, getattr(self.checkpoint_io, "async_calls_queue", None)
        finish = None
        if saves is not None and calls is not None:
            storage_options = storage_options or {}
            finish = partial(saves.failed.end, str(filepath), storage_options.get("finalize_fn"))
            storage_options["finalize_fn"] = finish
        if self._fit is None or saves is None:
            save(storage_options)
        else:
            self._fit.save(str(filepath), partial(save, storage_options), calls=calls, finish=finish)

    @override
    def _data_rank(self) -> int:
        return int(parallel_state.get_data_parallel_rank())

    def on_train_start(self) -> None:
        """Announce from now on when gradients are reduced."""
        if self._call is not None:
            announce_gradient_sync(self.megatron_parallel[0], self._call)

    @override
    def training_step(self, dataloader_iter: Any, *args: Any, **kwargs: Any) -> Any:
        call, replayed = self._call, self._fit.replayed if self._fit is not None else None
        if replayed is not None:
            return super().training_step(dataloader_iter, *args, loss_reduction=_KeptReduction(replayed), **kwargs)
        if call is not None:
            dataloader_iter = _PhasedIterator(dataloader_iter, call)
        output = super().training_step(dataloader_iter, *args, **kwargs)
        if call is not None:
            call.steps.loss = loss_of(output)
        return output

    @override
    def teardown(self) -> None:
        """Tear down, but leave the state alone if a fault ended the run: abort and finalizer clean up then."""
        if self._finish_fit():
            super().teardown()
        elif hasattr(self, "megatron_parallel"):
            self.megatron_parallel.teardown_ddp()


def _signature() -> inspect.Signature:
    """Return the signature of ``MegatronStrategy`` with what is ours, which editors show and NeMo-Run relies on."""
    ours = inspect.signature(CheckpointlessMegatronStrategy.__init__).parameters
    theirs = inspect.signature(MegatronStrategy)
    name, more = "num_distributed_optimizer_instances", ("on_save_error", "warm", "sdc_check_every")
    parameters = {**theirs.parameters, name: theirs.parameters[name].replace(default=ours[name].default)}
    ends = [each for each in parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
    begins = [each for each in parameters.values() if each not in ends]
    return theirs.replace(parameters=[*begins, *(ours[each] for each in more), *ends])


CheckpointlessMegatronStrategy.__signature__ = _signature()  # type: ignore[attr-defined]


# --- A LightningModule as its script gave it to the trainer -------------------------------------------------------
#
# A module that was made outside of the block is the same object at each entry. NeMo leaves in it the model that
# it built, over process groups that no longer exist, and functions bound to the old strategy. What was added is
# taken out when the generation ends, so that NeMo can set up again.


#: The modules of this generation, each with its attributes and what was in its tables.
_given: weakref.WeakKeyDictionary[pl.LightningModule, Any] = weakref.WeakKeyDictionary()


def _note_given_module(module: pl.LightningModule) -> None:
    """Note a module before its first fit of a generation. It is put back when the generation ends."""
    if module not in _given:
        attributes = vars(module)
        kept = {name: value for name, value in attributes.items() if name not in _TRAINER}
        _given[module] = kept, {name: dict(attributes[name]) for name in _TABLES}
    register_cleanup("given modules", _put_back)


def _put_back() -> None:
    """Take out of the modules what was added since, and let go of everything."""
    while _given:
        module, (kept, contents) = _given.popitem()
        attributes = vars(module)
        unbound: dict[str, Any] = {name: None for name in _TRAINER if name in attributes}
        tables = {name: attributes[name] for name in _TABLES}
        attributes.clear()
        attributes.update(kept, **unbound, **tables)
        for name, table in tables.items():
            table.clear()
            table.update(contents[name])


class _PhasedIterator(Iterator[Any]):
    """Lightning's iterator over batches, which announces phases of the step and notes what the step takes.

    It is no generator, which would be over after an error that a data step catches to take the next batch instead.
    """

    def __init__(self, inner: Iterator[Any], call: HPCallWrapper) -> None:
        self._inner = inner
        self._call = call

    def __next__(self) -> Any:
        step = self._call.steps.making
        self._call.enter_phase("data", step)
        item = next(self._inner)
        repeated_steps.take(step, item)
        self._call.enter_phase("forward", step)
        return item


# --- Parameter-efficient fine-tuning (PEFT) -----------------------------------------------------------------------


def _trained_names(chunks: Iterable[torch.nn.Module]) -> set[str]:
    """Return the names, as in the state's keys, of all that training may change: all but frozen parameters."""
    names: set[str] = set()
    for chunk in chunks:
        names |= {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
        names |= {name for name, _ in chunk.named_buffers()}
    return names


class _TensorsBeforeAdapters(MegatronTensors):
    """The tensors of a model whose adapters have not been added yet: enough to decide where to resume."""

    def __init__(self, chunks: Iterable[torch.nn.Module], will_be_distributed: bool) -> None:
        super().__init__(chunks, None)
        self._will_be_distributed = will_be_distributed

    @override
    def replica_groups(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        return {replicas(True): list(keys)} if self._will_be_distributed else super().replica_groups(keys)


# --- Steps as NeMo makes them with Megatron-core: guarded, noted, and replayed without computing anything ---------


class _MegatronSteps:
    """How NeMo's Megatron strategy makes steps (:class:`Steps`): a Megatron callback that notes outcomes."""

    def __init__(self, trainer: pl.Trainer, call: HPCallWrapper, sdc_check_every: int | None) -> None:
        strategy: Any = trainer.strategy
        self._fit_loop: Any = trainer.fit_loop
        self._models = strategy.megatron_parallel
        self._optimizer = strategy.optimizers[0].mcore_optimizer
        self.tensors = MegatronTensors(self._models, self._optimizer)
        self._check = GradientCheck(
            sdc_check_every,
            self.tensors,
            call,
            apart=[*check_contexts(sdc_check_every, list(self._models)), partial(unseen, trainer)],
            keep=partial(keep_metrics, trainer),
        )
        self._norms = NotedNorms(self._optimizer)
        self._models.callbacks.add(self)
        self.replayed: StepOutcome | None = None
        self._update: GuardedUpdate | None = None
        self._fetched_before = 0
        self._reduced: object = None
        self._has_outputs = False
        self.put_back: Callable[[], None]
        self.done: Callable[[], None]

    def guard(self, guard: UpdateGuard) -> None:
        self._update = GuardedUpdate(self.tensors, guard)

    def _fetched(self) -> int:
        fetcher = self._fit_loop._data_fetcher
        return fetcher.fetched if fetcher is not None else 0

    def on_megatron_step_start(self, step: MegatronStep) -> MegatronStep:
        if step.forward_only:
            return step
        self._fetched_before = self._fetched()
        self._norms.forget()
        known = {each.name: getattr(step, each.name) for each in fields(MegatronStep)}
        if self.replayed is None:
            data = _Batches(step.data) if self._check.is_due else step.data
            return _CheckedStep(**{**known, "data": data}, check=self._check)
        return _ReplayedStep(**known, outcome=self.replayed)

    def on_megatron_step_end(self, step: MegatronStep, microbatch_outputs: object, reduced: object) -> None:
        if not step.forward_only:
            self._reduced, self._has_outputs = reduced, bool(microbatch_outputs)

    def outcome(self, accumulated: Later[dict[str, Any]]) -> tuple[bool, Callable[[], dict[str, Any]]]:
        assert self._update is not None
        succeeded, norms = not self._update.overflow, self._norms
        reduced, has_outputs = copy_of(self._reduced), self._has_outputs
        fetched = self._fetched() - self._fetched_before
        grad_norm = copy_of(norms.grad_norm if succeeded else None)
        num_zeros = copy_of(norms.num_zeros if succeeded else None)
        return succeeded, lambda: vars(
            StepOutcome(reduced(), has_outputs, fetched, succeeded, grad_norm(), num_zeros(), accumulated())
        )

    def update(self, make: Callable[[], object]) -> object:
        outcome = self.replayed
        if outcome is None:
            return make()
        kept = outcome.succeeded, outcome.grad_norm, outcome.num_zeros

        def step() -> tuple[bool, float | None, float | None]:
            """Stand in for the update: put back what forward and backward have logged, and compute nothing."""
            self.put_back()
            return kept

        self._optimizer.step = step
        try:
            return make()
        finally:
            del self._optimizer.step
            self.done()


class _Batches(Iterator[Any]):
    """An iterator over batches, which gives them once more after :meth:`rewind`."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self._taken: list[Any] = []

    def __next__(self) -> Any:
        item = next(self._inner)
        self._taken.append(item)
        return item

    def rewind(self) -> None:
        self._inner, self._taken = iter(self._taken), []


@dataclass
class _CheckedStep(MegatronStep):
    """A step whose gradients ``check`` may compare with those of another run."""

    check: GradientCheck | None = None

    def __call__(self) -> list[Any]:
        assert self.check is not None
        return self.check.run(super().__call__, self._again)

    def _again(self) -> None:
        self.data.rewind()
        super().__call__()


class _KeptReduction:
    """Stands in for the loss reduction of a step that is replayed."""

    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    def reduce(self, microbatch_outputs: object) -> object:
        return self._outcome.reduced


@dataclass
class _ReplayedStep(MegatronStep):
    """A step that takes its batches from the loader and computes nothing."""

    outcome: StepOutcome = field(default_factory=lambda: StepOutcome(None, False, 0, True, None, None))

    def __call__(self) -> list[Any]:
        for _ in range(self.outcome.fetched):
            next(self.data)
        return [self.outcome.reduced] if self.outcome.has_outputs else []


# --- A model that was kept over a fault ---------------------------------------------------------------------------


class _WarmStart:
    """The set-up of one fit by a Megatron strategy, whose process groups are built and nothing else."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        self._strategy: Any = strategy
        self._kept: KeptModel | None = None
        self._everywhere = False
        self._streams = RngStates.capture().without_sources()
        self._left = RngStates()
        self._obstacle = _obstacle(strategy)
        self._plans = _plans(strategy) if self._obstacle is None else {}
        self._noted: list[dict[str, Any]] = []  # by virtual pipeline stage
        if self._obstacle is None:
            strategy.lightning_module.configure_model = partial(self._configure, strategy.lightning_module)

    @property
    def is_warm(self) -> bool:
        return self._kept is not None

    def agree(self, manager: CheckpointManager | None) -> None:
        """Take what ``manager`` keeps for this fit, if it fits, and notify the other ranks. Collective."""
        found, reason = manager.kept if manager is not None else None, ""
        if manager is not None and found is not None and found[0] == manager.fits.number + 1:
            kept = cast("KeptModel", found[1])
            begun, self._left = kept.streams
            reason = self._obstacle or kept.mismatch(self._plans) or kept.unfit() or ""
            if not reason and self._streams.streams != begun.streams:
                reason = "random numbers were drawn otherwise before"
            self._kept = None if reason else kept
        self._everywhere = true_on_all(self.is_warm)
        if self._kept is not None and not self._everywhere and self._kept.builds_together:
            reason = "another rank builds its model, and exchanges weights meanwhile"
        if reason and manager is not None:
            manager.kept = self._kept = None
            self._left = RngStates()
            emit_event(EventName.WARM, kept=False, reason=reason)

    def _configure(self, module: Any, vp_stage: int | None = None) -> None:
        """Stand in for ``configure_model`` of the next virtual stage: have it build, unless it is kept."""
        vars(module).pop("configure_model", None)
        values = vars(module.config)
        if self._kept is not None:
            noted = self._kept.noted[len(self._noted)]
            values.update(noted)
            if not self._everywhere:
                self._kept.take_part(len(self._noted), module.config.params_dtype)
        else:
            before = dict(values)
            module.configure_model(vp_stage=vp_stage)
            noted = {name: value for name, value in values.items() if value is not before.get(name, before)}
        self._noted.append(noted)

    @contextmanager
    def _stages(self) -> Iterator[None]:
        """Have NeMo, which copies the module for each further virtual pipeline stage, find those built, too."""
        original, own = io.reinit, threading.get_ident()

        def reinit(module: Any) -> Any:
            made: Any = original(module)
            if threading.get_ident() != own:
                return made  # it copies something else
            made.configure_model = partial(self._configure, made)
            if self._kept is not None:
                _put(self._kept.chunks[len(self._noted)], made)
            return made

        io.reinit = reinit if self._obstacle is None else original
        try:
            yield
        finally:
            io.reinit = original

    @contextmanager
    def build(self) -> Iterator[None]:
        """Have NeMo find everything built that was kept, while it builds model and optimizer in the context."""
        kept = self._kept
        if kept is None:
            with self._stages():
                yield
            self._left = RngStates.capture()
            return
        began_s = time.monotonic()
        _put(kept.chunks[0], self._strategy.lightning_module)
        replaced = kept.bind()
        emit_event(
            EventName.WARM,
            kept=True,
            everywhere=self._everywhere,
            references=replaced,
            seconds=time.monotonic() - began_s,
        )
        plugin = self._strategy.precision_plugin
        if hasattr(plugin, "convert_module"):
            plugin.convert_module = self._convert
        try:
            with kept.in_place_of_new(self._everywhere), self._stages():
                yield
            self._left.restore()  # a model that is built draws its first weights
        finally:
            vars(plugin).pop("convert_module", None)

    @contextmanager
    def add_adapters(self, peft: PEFT) -> Iterator[None]:
        """Have NeMo's callback find adapters and optimizer in place that were kept, while it adds them."""
        kept = self._kept
        if kept is None:
            yield
            return
        counted: Any = peft.model_transform
        peft.model_transform = lambda model: None  # they are in place
        try:
            with kept.in_place_of_new(self._everywhere):
                yield
        finally:
            peft.model_transform = counted
        counted.__num_calls__ += 1  # else they are added when the first epoch begins
        peft.params_to_save = set(kept.saved)  # DDP, which is in place already, has other names for them

    def _convert(self, module: Any) -> Any:
        """Do what a precision plugin does to a model besides wrapping it, which is done."""
        dtypes = getattr(self._strategy.precision_plugin, "dtype_config", None)
        if dtypes is not None and (dtypes.fp16 or dtypes.bf16):
            config = get_model_config(module.module)
            config.fp16, config.bf16 = dtypes.fp16, dtypes.bf16
        return module

    @property
    def bound(self) -> LaunchBound | None:
        """What bounds the launches of the model that was kept; None: nothing, or no model was kept."""
        return self._kept.bound if self._kept is not None else None

    def built(self, bound: LaunchBound | None) -> object:
        """Return what is built now, for the next fault; ``bound``: what bounds the launches of its layers."""
        if self._obstacle is not None:
            return SimpleNamespace(unfit=partial(str, self._obstacle))
        strategy = self._strategy
        chunks = [chunk.module for chunk in strategy.megatron_parallel]
        optimizer, streams = strategy.optimizers[0].mcore_optimizer, (self._streams, self._left)
        saved = self._kept.saved if self._kept is not None else _saved(strategy)
        return KeptModel(chunks, optimizer, self._plans, streams, self._noted, bound, saved)


def _put(chunk: Any, module: Any) -> None:
    """Put a chunk that was kept into a new module that would build it, with the functions of the new trainer."""
    config = get_model_config(chunk)
    vars(config).update(vars(module.config))
    module.config = config
    module.module = chunk


def _obstacle(strategy: Any) -> str | None:
    """Return why the model that ``strategy`` is about to build cannot be one that was kept; None: it can."""
    module = strategy.lightning_module
    for each in (module, *module.trainer.callbacks):
        if _acts_before_the_restore(each):
            return f"on_fit_start of {type(each).__name__} would find a trained model"
    if getattr(type(module), "configure_model", None) is not GPTModel.configure_model:
        return f"it is not known how {type(module).__name__} builds its model"
    if hasattr(module, "module"):
        return "the model was built before the fit"
    transform = module.model_transform
    added = any(each is transform for each in module.trainer.callbacks)
    if transform is not None and not (added and type(transform) is LoRA):
        return f"it is not known how {type(transform).__name__} changes the model"
    if module.model_context_managers:
        return "the model is built in contexts of its own"
    if not isinstance(strategy.ddp_config, DistributedDataParallelConfig):
        return "the model is not in Megatron's DistributedDataParallel"
    return None


def _acts_before_the_restore(part: object) -> bool:
    """Return whether a callback or module of the user's acts between the set-up of a model and its restore."""
    hook = getattr(part, "on_fit_start", None)  # LambdaCallback has it in an attribute of its own
    return not getattr(hook, "__module__", "").startswith(
        ("lightning.", "pytorch_lightning.", "nemo.", "checkpointless.")
    )


def _plans(strategy: Any) -> dict[str, dict[str, object]]:
    """Return fingerprints of the configurations that decide how model and optimizer are built."""
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    optim = module.optim
    rules = {name: getattr(optim, name, None) for name in ("no_weight_decay_cond", "scale_lr_cond", "lr_mult")}
    dtypes = getattr(plugin, "dtype_config", None)
    values = {
        "model": vars(module.config),
        "optimizer": {"class": type(optim), **rules, **vars(optim.config)},
        "DistributedDataParallel": vars(strategy.ddp_config),
        "precision": {"class": type(plugin), "types": dtypes},
        "virtual stages": vars(io.reinit(module).config) if strategy.virtual_pipeline_model_parallel_size else {},
        "adapters": _settings(module.model_transform) if module.model_transform is not None else {},
        "tokenizer": {"class": type(module.tokenizer), "size": getattr(module.tokenizer, "vocab_size", None)},
    }
    # The other names are a framework's notes of how a configuration was made.
    return {
        what: fingerprints({name: value for name, value in each.items() if not name.startswith("__")})
        for what, each in values.items()
    }


def _settings(transform: LoRA) -> dict[str, object]:
    """Return what decides which adapters are added: the rest of the callback changes while they are."""
    return {field.name: getattr(transform, field.name) for field in dataclasses.fields(transform)}


def _saved(strategy: Any) -> Collection[str]:
    """Return the names of the parameters that are saved as adapters, which are in place but not wrapped yet."""
    callbacks = strategy.lightning_module.trainer.callbacks
    return next((each.params_to_save for each in callbacks if isinstance(each, PEFT)), ())
