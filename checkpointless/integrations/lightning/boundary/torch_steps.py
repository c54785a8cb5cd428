"""Steps as Lightning makes them with a torch optimizer: guarded, noted, and replayed without computing anything.

Lightning's automatic optimization runs forward, backward, hooks and clipping in a closure that the optimizer's
``step`` is given. Here the closure runs first, then come the vote and the update, under the lock.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning_utilities.core.apply_func import apply_to_collection
from typing_extensions import override

from checkpointless.callbacks.step_recorder import loss_of
from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.integrations.lightning.boundary.step_keeper import take_state
from checkpointless.integrations.lightning.boundary.steps import StepOutcome
from checkpointless.integrations.torch.torch_tensors import TorchTensors
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import Later

logger = logging.getLogger(__name__)

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


class TorchSteps:
    """How Lightning makes steps with a torch optimizer, in automatic optimization.

    Raises:
        UnrecoverableError: such steps cannot be guarded.

    Attributes:
        replayed: the outcome of the committed step that is replayed; None: a step is computed.
    """

    def __init__(self, trainer: pl.Trainer, call: HPCallWrapper) -> None:
        strategy: Any = trainer.strategy
        self._trainer = trainer
        self._call = call
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self.tensors = TorchTensors([strategy.model], strategy.optimizers, is_known=call.high_water > 0)
        self.tensors.arrange()
        self._loop = _ObservedOptimization.adopt(trainer, self)
        self.replayed: StepOutcome | None = None
        self._guard: UpdateGuard | None = None
        self._is_updated = self._overflows = False
        self._accumulates = False if call.high_water > 0 else None  # whether gradients wait for more; None: unknown
        self._to_put_back: list[Callable[[], None]] = []

    def guard(self, guard: UpdateGuard) -> None:
        """Guard every update from now on."""
        self._guard = guard

    # --- a step that is computed ----------------------------------------------------------------------------------

    def begin(self, batch_idx: int) -> None:
        """Begin the computation of a batch.

        Args:
            batch_idx: its number in the epoch, from 0.

        Raises:
            UnrecoverableError: gradients of the step before would be added to those of this step, or gradients of
                this step be dropped. After a fault there are none.
        """
        self._is_updated = self._overflows = False
        every = self._trainer.accumulate_grad_batches
        if self.replayed is None and batch_idx and self._accumulates not in (None, bool(batch_idx % every)):
            what = "is within the step" if self._accumulates else "is the first of its step"
            raise UnrecoverableError(_WITHIN.format(every, batch_idx, what))

    def end(self) -> None:
        """End the computation of a batch."""
        self._accumulates = self.replayed is None and not self._is_updated

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step with ``make``, as Lightning does, by the optimizer's ``step``; or replay it."""
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
        """Take the outcome of the step whose gradients are final now."""
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

    @contextmanager
    def replay(
        self, outcome: StepOutcome, put_back: Callable[[], None], done: Callable[[], None]
    ) -> Iterator[None]:
        """Give training steps ``outcome`` while the context lasts; they compute nothing."""
        self.replayed = outcome
        self._to_put_back = [put_back, partial(self._put_progress, outcome), done]
        try:
            yield
        finally:
            self.replayed = None

    def _put_back_once(self) -> None:
        """Put back what the step had left when its gradients were final."""
        pending, self._to_put_back = self._to_put_back, []
        for each in pending:
            each()

    def _put_progress(self, outcome: StepOutcome) -> None:
        assert outcome.state is not None
        checkpoint = outcome.state["checkpoint"]
        self._loop.optim_progress.optimizer.zero_grad.load_state_dict(checkpoint["loops"])
        if self._scaler is not None:
            self._scaler.load_state_dict(checkpoint[_PLUGIN])


class _ObservedOptimization(_AutomaticOptimization):
    """Lightning's automatic optimization of a batch, which reports to :class:`TorchSteps` what it does.

    Attributes:
        closure: what computes the batch; None: the batch is replayed, or there was none.
    """

    steps: TorchSteps
    closure: Closure | None

    @classmethod
    def adopt(cls, trainer: pl.Trainer, steps: TorchSteps) -> _ObservedOptimization:
        """Make the automatic optimization of ``trainer`` report to ``steps``, in place."""
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        loop.__class__ = cls
        loop.steps, loop.closure = steps, None
        observed: _ObservedOptimization = loop
        return observed

    @override
    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Compute a batch, and update if it is the last of a step."""
        self.steps.begin(batch_idx)
        output: dict[str, Any] = super().run(optimizer, batch_idx, kwargs)
        self.steps.end()
        return output

    @override
    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        """Compute the last batch of a step, and update."""
        with self.steps.guarded():
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)

    @override
    def _make_closure(self, kwargs: Any, optimizer: torch.optim.Optimizer, batch_idx: int) -> Any:
        """Return what computes the batch, or stands for it."""
        outcome = self.steps.replayed
        if outcome is not None:
            assert outcome.state is not None
            device = self.trainer.strategy.root_device
            return _KeptResult(move_data_to_device(outcome.state["output"], device))
        self.closure = super()._make_closure(kwargs, optimizer, batch_idx)
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
        """Return what was computed."""
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
    """Return the state of a ``torch.amp.GradScaler`` after an update whose gradients did not overflow.

    Args:
        state: its ``state_dict()`` before.
    """
    if not state:
        return {}
    scale = torch.tensor(state["scale"], dtype=torch.float32)
    tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32)
    factors = state["growth_factor"], state["backoff_factor"], state["growth_interval"]
    torch._amp_update_scale_(scale, tracker, torch.zeros(()), *factors)
    return {**state, "scale": float(scale), "_growth_tracker": int(tracker)}
