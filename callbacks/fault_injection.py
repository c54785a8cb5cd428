"""The callback that causes faults at given phases of Lightning's loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from checkpointless.callbacks.trainer_parts import job_step, worker_iterators
from checkpointless.faults.inject import FaultInjector
from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import FaultPhase, parse_all
from checkpointless.inprocess import active_call_wrapper
from checkpointless.system.environment import WORLD_SIZE_ENV, own_rank, own_run_dir


class HPFaultInjectionCallback(Callback):
    """Injects faults into any Lightning trainer, to test recovery. It is off unless it is asked for.

    It never touches the training's random streams. Phases inside the optimizer update and in the set-up of a
    generation need a checkpointless strategy; the others work with every strategy. The kind ``dataloader`` needs a
    loader with workers.

    Args:
        faults: fault specs, such as ``exception@forward:rank=2,step=7``.
        injector: an injector to use instead of ``faults``.

    Raises:
        FaultSpecError: a spec is wrong, or asks for a GPU where CUDA is not available.
    """

    def __init__(self, faults: Sequence[str] = (), *, injector: FaultInjector | None = None) -> None:
        if injector is None:
            world_size = os.environ.get(WORLD_SIZE_ENV)
            injector = FaultInjector(
                parse_all(
                    list(faults),
                    world_size=int(world_size) if world_size else None,
                    max_steps=None,
                    cuda=torch.cuda.is_available(),
                ),
                own_rank(),
                FaultLedger(own_run_dir()),
            )
        self.injector = injector
        self._step = 0
        self._backward_hook: Any = None
        self.listen()

    def listen(self) -> None:
        """Have the running wrapper cause these faults at its phases, unless the job was launched with some."""
        call = active_call_wrapper()
        if call is not None and (call.faults is None or not call.faults.of_job):
            call.faults = self.injector

    @classmethod
    def from_environment(cls) -> HPFaultInjectionCallback | None:
        """Return the callback that ``checkpointless run --fault`` asks this process for, or None."""
        call = active_call_wrapper()
        injector = call.faults if call is not None else FaultInjector.from_environment(own_rank())
        return cls(injector=injector) if injector is not None and injector.of_job else None

    def enter_phase(self, phase: str, step: int) -> None:
        """Cause the faults that are due at ``phase`` of ``step``."""
        call = active_call_wrapper()
        self.injector.at(FaultPhase(phase), step, call.generation if call is not None else 0)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step. With a strategy that announces no phases, the batch of the step is already fetched here."""
        self._step = job_step(trainer) + 1
        trainer_ref = weakref.ref(trainer)
        self.injector.batches = lambda: _batches_of(trainer_ref())
        if hasattr(trainer.strategy, "journal"):
            strategy = weakref.proxy(trainer.strategy)
            self.injector.target = lambda: next(iter(strategy.journal().state.shard().values()))
        trainable = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        if self._backward_hook is None and trainable:
            self._backward_hook = trainable[-1].register_hook(lambda grad: self.enter_phase("backward", self._step))
        if active_call_wrapper() is None:
            self.enter_phase("data", self._step)
            self.enter_phase("forward", self._step)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Enter the phase ``sync``, unless the strategy announces itself when gradients are reduced."""
        if not hasattr(trainer.strategy, "megatron_parallel"):
            self.enter_phase("sync", self._step)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.enter_phase("before_optimizer", self._step)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Enter the phases that follow the commit of the step, if the batch completes one."""
        if trainer.fit_loop._should_accumulate():
            return
        self.enter_phase("after_optimizer", self._step)
        self.enter_phase("between", self._step)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._backward_hook is not None:
            self._backward_hook.remove()
            self._backward_hook = None


def _batches_of(trainer: pl.Trainer | None) -> Any:
    fit_loop = getattr(trainer, "fit_loop", None)
    return next(iter(worker_iterators(getattr(fit_loop, "_combined_loader", None))), None)
