"""Recovery for a hand-written training loop: any modules, any ``torch.optim`` optimizer, no framework."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.kernels import unabortable
from checkpointless.precision import unsupported_in_a_loop
from checkpointless.recovery.guard import guarded_update
from checkpointless.recovery.loop import LoopTraining
from checkpointless.transfer.module_tensors import TrainingTensors
from checkpointless.transfer.sharded_tensors import replicas_of

_COMMUNICATES = (
    "an optimizer communicates in its step (torch.optim.Muon does with DTensors, and any does whose gradients are "
    "still to be reduced over tensor-parallel ranks), so that a fault in an update would find ranks on both sides "
    "of it: reduce gradients before update(), or use another optimizer"
)


class PlainTraining(LoopTraining):
    """Modules, optimizers and schedulers of a hand-written training loop, for
    :class:`~checkpointless.recovery.CheckpointManager`.

    Inside a function wrapped with :class:`checkpointless.inprocess.HPWrapper`::

        training = PlainTraining(caller, [model], [optimizer])
        for step in training.steps(1000):
            loss = model(batch_of(step)).mean()
            loss.backward()            # and the gradients' all-reduce
            training.update()          # in place of optimizer.step() and optimizer.zero_grad()

    A batch must follow from the step's number and the random streams; each rank gets its own streams back after a
    fault. If the batch comes from a ``DataLoader`` whose workers draw random numbers, pass the loader to
    :func:`~checkpointless.recovery.seed_data_workers` and give it a separate ``generator``. Otherwise each iterator
    draws a number from the training's stream, and after a fault there is one iterator more. Gradients must be final
    (reduced and clipped) when :meth:`update` is called. Of the phases of fault specs, ``before_optimizer`` to
    ``between`` and ``recovery`` are announced.

    Args:
        call: the running wrapper. Its ``checkpoint_manager`` is used; if there is none, one is made.
        modules: the modules that are trained.
        optimizers: the optimizers of the modules.
        schedulers: the learning-rate schedulers, which step with every update.
        group: the global ranks that hold the same modules and optimizers. Default: what the meshes of the modules'
            DTensors say (FSDP2, HSDP, tensor parallelism by a plan), else all ranks (data parallel).

    Raises:
        UnrecoverableError: the modules cannot be recovered.
        ValueError: this rank is in no mesh of a parameter.
    """

    _how_to_get_replicas = (
        "A mesh with a dimension of replicas (HSDP) helps, or group=, if ranks outside of the mesh hold the same"
    )

    def __init__(
        self,
        call: HPCallWrapper,
        modules: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        schedulers: Sequence[Any] = (),
        group: Sequence[int] | None = None,
    ) -> None:
        modules = list(modules)
        parts = [part for module in modules for part in module.modules()]
        reason = unsupported_in_a_loop(parts)
        for part in parts:
            reason = reason or unabortable(getattr(part, "config", None))
        if reason is not None:
            raise UnrecoverableError(reason)
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        sharded: list[Any] = [part for part in parts if isinstance(part, getattr(fsdp, "FSDPModule", ()))]
        for each in sharded:
            each.reshard()  # after a forward pass whole parameters are in the places of shards
        TrainingTensors.__init__(self, modules, optimizers)
        # As they are now: while FSDP2 computes, whole parameters are in the places of the divided ones.
        self._named = {id(module): list(module.named_parameters()) for module in modules}
        self._optimizers = list(optimizers)
        # Whether the job's first update has shown what optimizers do. Beside later ones threads may communicate.
        self._is_known = call.generation > 0
        self._group = tuple(sorted(group)) if group is not None else self._replicas()
        self._refuse_what_cannot_travel()
        self.begin(call, schedulers)

    def _replicas(self) -> tuple[int, ...]:
        """Return the ranks that hold the same as this one, as far as the parameters tell."""
        parameters = [parameter for named in self._named.values() for _, parameter in named]
        return replicas_of(parameters, dist.get_rank()) or tuple(range(dist.get_world_size()))

    @override
    def parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters that the module had when the training began, with their names."""
        return iter(self._named[id(module)])

    def update(self, loss: float | None = None) -> None:
        """Apply the gradients, on all ranks or on none, and clear them.

        Args:
            loss: the loss of the step, which is kept with the step if steps are recorded.
        """
        self._call.steps.loss = loss
        guarded_update(
            self._call.steps.making,
            self.apply_held_update,
            lock=self._call.parameter_update_lock,
            ready=self._ready,
            committed=self._call.committed,
            phase=self._call.enter_phase,
        )
        self.step = self._call.steps.making
        self._record(loss)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    @override
    def group(self) -> tuple[int, ...]:
        """Return the global ranks that hold the same state."""
        return self._group

    @override
    def step_optimizers(self) -> bool:
        """Make one step of every optimizer.

        Raises:
            UnrecoverableError: in the first step of the job, an optimizer communicates, or its state cannot be
                carried over.
        """
        launched = process_groups.launched() if not self._is_known else None
        for optimizer in self._optimizers:
            optimizer.step()
        if launched is not None:
            if process_groups.launched() != launched:
                raise UnrecoverableError(_COMMUNICATES)
            self._refuse_what_cannot_travel()
            self._is_known = True
        return True

    def _refuse_what_cannot_travel(self) -> None:
        reason = self.unfit()
        if reason is not None:
            raise UnrecoverableError(f"no other process could be given this state: {reason}")

    @override
    def derive(self) -> None:
        """Do nothing: every rank of the group holds everything, so nothing follows from other ranks' shards."""
