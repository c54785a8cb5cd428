"""Recovery for a loop of one's own over Megatron-core: any layout, Megatron's optimizers, no Lightning or NeMo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.integrations.megatron import cleanup
from checkpointless.integrations.megatron.state import MegatronTensors
from checkpointless.integrations.megatron.update import GuardedUpdate, check_contexts
from checkpointless.integrations.torch.gradient_check import GradientCheck
from checkpointless.integrations.torch.loop import LoopTraining
from checkpointless.recovery.manager import running_block
from checkpointless.state.journal import Captured


class MegatronTraining(LoopTraining):
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
        sdc_check_every: as for :class:`~checkpointless.PlainTraining`.

    Attributes:
        checked: as for :class:`~checkpointless.PlainTraining`, but for the whole schedule with all micro-batches,
            of which ``compute`` makes the iterator:
            ``training.checked(lambda: forward_backward_func(data_iterator=iter(batches), ...))``.

    Raises:
        UnrecoverableError: the update cannot be guarded, or the state cannot be carried over, or a setting keeps
            ``sdc_check_every`` from seeing gradients.
        ValueError: no chunk or no optimizer is given, no block is running, or ``sdc_check_every`` is less than 1.
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
        sdc_check_every: int | None = None,
    ) -> None:
        call = running_block(call)
        if not chunks or optimizer is None:
            raise ValueError("MegatronTraining(chunks=[...], optimizer=...): give the chunks and the optimizer")
        tensors = MegatronTensors(chunks, optimizer)
        self._check = GradientCheck(sdc_check_every, tensors, call, apart=check_contexts(sdc_check_every, chunks))
        self.checked = self._check.run
        super().__init__(tensors, call, schedulers, state, [optimizer])
        self._optimizer = optimizer
        self._increment: int | None = None
        self._update = GuardedUpdate(tensors, self._guard)

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
        self._check.require()
        self._compute(loss)
        self._increment = increment
        outcome: tuple[bool, float | None, int | None] = self._optimizer.step()
        self.step = self._call.steps.making
        self._record(loss)
        self._clear_gradients()
        return outcome

    def _clear_gradients(self) -> None:
        for chunk in self.state.modules:
            zero: Any = getattr(chunk, "zero_grad_buffer", chunk.zero_grad)
            zero()
        self._optimizer.zero_grad()

    @override
    def _arrange(self) -> None:
        """Drop gradients from before the training: after a fault, they would be those of another step."""
        self._clear_gradients()

    @override
    def ready(self, step: int) -> Captured:
        """Capture what only this rank has of ``step``, and whether its gradients overflow."""
        return replace(super().ready(step), is_skipped=self._update.overflow)

    @override
    def _step_scheduler(self, scheduler: Any) -> None:
        """Make one step of a scheduler, by as many samples as it is given."""
        if self._increment is None:
            scheduler.step()
        else:
            scheduler.step(increment=self._increment)
