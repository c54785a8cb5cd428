"""Recovery for a loop of one's own over Megatron-core: any layout, Megatron's optimizers, no Lightning or NeMo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, HPWrapper, UnrecoverableError
from checkpointless.integrations.megatron import cleanup, cpu_platform
from checkpointless.integrations.megatron.state import MegatronTensors
from checkpointless.integrations.megatron.update import GuardedUpdate
from checkpointless.integrations.torch.loop import LoopTraining
from checkpointless.integrations.torch.param_groups import grown, sizes_of
from checkpointless.recovery.running import running_block


class MegatronTraining(LoopTraining, MegatronTensors):
    """Model chunks, Megatron's optimizer and schedulers of a loop of one's own, for
    :class:`~checkpointless.recovery.CheckpointManager`.

    On the function that builds everything and trains::

        @MegatronTraining.wrapper()    # HPWrapper, with prepare() at every entry
        def main():
            ...                        # parallel state, model, DistributedDataParallel, get_megatron_optimizer
            training = MegatronTraining(chunks=model_chunks, optimizer=optimizer, schedulers=[scheduler])
            for step in training.steps(1000):
                losses = forward_backward_func(...)  # with finalize_model_grads, as always
                training.update(loss, increment=batch_size)  # for optimizer.step(), scheduler.step(), zero_grad

    The optimizer may be distributed, in mixed precision, or in fp32, chained or not. With the distributed optimizer
    give ``num_distributed_optimizer_instances=2`` to ``DistributedDataParallelConfig`` and to
    ``parallel_state.initialize_model_parallel``, so that every shard has two holders; or keep copies in tiers. A
    batch must follow from the step's number and the random streams.

    Args:
        call: the running wrapper; None: it is found. Its ``checkpoint_manager`` is used; if there is none, one is
            made.
        chunks: the model's chunks, each in Megatron's ``DistributedDataParallel``.
        optimizer: what ``get_megatron_optimizer`` returned.
        schedulers: the schedulers of learning rate and weight decay: Megatron's ``OptimizerParamScheduler``, or
            torch's.
        state: what else the loop changes, as for :class:`~checkpointless.PlainTraining`.

    Raises:
        UnrecoverableError: the update cannot be guarded, or the state cannot be carried over.
        ValueError: no chunk or no optimizer is given, or no block is running.
    """

    _how_to_get_replicas = "num_distributed_optimizer_instances=2 gives each shard a second holder"

    def __init__(
        self,
        call: HPCallWrapper | None = None,
        chunks: Sequence[torch.nn.Module] = (),
        optimizer: MegatronOptimizer | None = None,
        *,
        schedulers: Sequence[Any] = (),
        state: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        call = running_block(call)
        if not chunks or optimizer is None:
            raise ValueError("MegatronTraining(chunks=[...], optimizer=...): give the chunks and the optimizer")
        MegatronTensors.__init__(self, chunks, optimizer)
        self._optimizer = optimizer
        self._sizes = sizes_of(self._torch_optimizers)
        self._increment: int | None = None
        self.begin(call, schedulers, state, [optimizer])
        self._guard = GuardedUpdate(
            optimizer,
            models=chunks,
            lock=call.parameter_update_lock,
            step=lambda: call.steps.making,
            ready=self._ready,
            applied=lambda _: self.applied(not self._guard.overflow),
            committed=call.committed,
            phase=call.enter_phase,
            vote=self._vote,
        )

    @staticmethod
    def wrapper(wrapper: HPWrapper | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator: ``wrapper`` around a function that begins with :meth:`prepare`.

        Args:
            wrapper: None: ``HPWrapper()``.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def prepared(*args: Any, **kwargs: Any) -> Any:
                MegatronTraining.prepare()
                return function(*args, **kwargs)

            return (wrapper or HPWrapper())(prepared)

        return decorate

    @staticmethod
    def prepare() -> None:
        """Have Megatron's globals dropped before the function is entered again. Call it before a model is built.

        If the job was started with ``--cpu``, Megatron-core is made to train on CPUs as well.
        """
        if cpu_platform.requested():
            cpu_platform.install()
        cleanup.install()

    def update(
        self, loss: float | None = None, increment: int | None = None
    ) -> tuple[bool, float | None, int | None]:
        """Apply the gradients, on all ranks or on none, and clear them.

        Args:
            loss: the loss of the step, which is kept with the step if steps are recorded.
            increment: what Megatron's schedulers step by, in samples; None: their ``step`` has no argument.

        Returns:
            What ``MegatronOptimizer.step`` returns: whether the step was not skipped, the norm of the gradients,
            and how many are zero.
        """
        self._compute(loss)
        self._increment = increment
        outcome: tuple[bool, float | None, int | None] = self._optimizer.step()
        self.step = self._call.steps.making
        self._record(loss)
        self._clear_gradients()
        return outcome

    def _clear_gradients(self) -> None:
        for chunk in self.modules:
            zero: Any = getattr(chunk, "zero_grad_buffer", chunk.zero_grad)
            zero()
        self._optimizer.zero_grad()

    @override
    def arrange(self) -> None:
        """Drop gradients from before the training: after a fault, they would be those of another step."""
        self._clear_gradients()

    @override
    def group(self) -> tuple[int, ...]:
        """Return the global ranks that hold all that this rank holds."""
        return MegatronTensors.group(self)

    @override
    def take_groups(self) -> Callable[[], list[list[dict[str, Any]]]]:
        """Take the values of the optimizers' param groups; return what makes them as they are now."""
        return MegatronTensors.take_groups(self)

    @override
    def updated_parameters(self) -> list[torch.Tensor]:
        """Return the parameters that are updated on this rank."""
        return MegatronTensors.updated_parameters(self)

    @override
    def step_optimizers(self) -> bool:
        """Apply the update whose final gradients are held, unless they had overflowed."""
        if not self._guard.overflow:
            MegatronTensors.apply_held_update(self)
        return not self._guard.overflow

    @override
    def _step_scheduler(self, scheduler: Any) -> None:
        """Make one step of a scheduler, by as many samples as it was told."""
        if self._increment is None:
            scheduler.step()
        else:
            scheduler.step(increment=self._increment)

    @override
    def more_objects(self) -> Mapping[str, Any]:
        """Return the states of the loss scalers, which modules train, and which parameters are trained.

        Raises:
            UnrecoverableError: an optimizer has other parameters than at the beginning.
        """
        reason = grown(self._torch_optimizers, self._sizes)
        if reason:
            raise UnrecoverableError(reason)
        return {"scalers": self.scalers(), **self.take_modules()}

    @override
    def changed(self) -> str:
        """Return why the tensors are not those of the newest moment; "" if nothing is known of it."""
        return grown(self._torch_optimizers, self._sizes) or super().changed()

    @override
    def settle(self) -> None:
        """Derive parameters in FP8 before the first step, too. Collective."""
        MegatronTensors.settle(self)

    @override
    def derive(self) -> None:
        """Derive the model's parameters from the shards of all ranks. Collective."""
        MegatronTensors.derive(self)
