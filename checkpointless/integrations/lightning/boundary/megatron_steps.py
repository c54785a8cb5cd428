"""Steps as NeMo makes them with Megatron-core: guarded, noted, and replayed without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import lightning.pytorch as pl
from nemo.lightning.megatron_parallel import MegatronStep

from checkpointless.integrations.lightning.boundary.steps import StepOutcome
from checkpointless.integrations.megatron.state import MegatronTensors
from checkpointless.integrations.megatron.update import GuardedUpdate, NotedNorms
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.serialization.state_tree import Later, copy_of


class MegatronSteps:
    """How NeMo's Megatron strategy makes steps.

    Args:
        fetched: returns how many batches the loader's fetcher has counted.

    Attributes:
        replayed: the outcome of the committed step that is replayed; None: a step is computed.
    """

    def __init__(self, trainer: pl.Trainer, fetched: Callable[[], int]) -> None:
        strategy: Any = trainer.strategy
        self._models = strategy.megatron_parallel
        self._optimizer = strategy.optimizers[0].mcore_optimizer
        self.tensors = MegatronTensors(self._models, self._optimizer)
        self._outcomes = _StepOutcomes(NotedNorms(self._optimizer), fetched)
        self._models.callbacks.add(self._outcomes)
        self.replayed: StepOutcome | None = None
        self._update: GuardedUpdate | None = None
        self._put_back: Callable[[], None]
        self._done: Callable[[], None]

    def guard(self, guard: UpdateGuard) -> None:
        """Guard every update from now on.

        Raises:
            UnrecoverableError: the update cannot be guarded; the message says what to set.
        """
        self._update = GuardedUpdate(self._optimizer, self._models, guard)

    def outcome(self, accumulated: Later[dict[str, Any]]) -> tuple[bool, Callable[[], dict[str, Any]]]:
        """Take the outcome of the step whose gradients are final now."""
        assert self._update is not None
        succeeded = not self._update.overflow
        return succeeded, self._outcomes.take(succeeded, accumulated)

    @contextmanager
    def replay(
        self, outcome: StepOutcome, put_back: Callable[[], None], done: Callable[[], None]
    ) -> Iterator[None]:
        """Give training steps ``outcome`` while the context lasts; they compute nothing."""
        self._put_back, self._done = put_back, done
        self.replayed = self._outcomes.replayed = outcome
        try:
            yield
        finally:
            self.replayed = self._outcomes.replayed = None

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step with ``make``, as NeMo does, or replay it."""
        outcome = self.replayed
        if outcome is None:
            return make()
        kept = outcome.succeeded, outcome.grad_norm, outcome.num_zeros

        def step() -> tuple[bool, float | None, float | None]:
            """Stand in for the update: put back what forward and backward have logged, and compute nothing."""
            self._put_back()
            return kept

        self._optimizer.step = step
        try:
            return make()
        finally:
            del self._optimizer.step
            self._done()


class _StepOutcomes:
    """A Megatron callback that notes the outcome of each training step.

    Args:
        fetched: returns how many batches the loader's fetcher has counted.

    Attributes:
        replayed: the outcome of the step that is replayed: its training step computes nothing. None: there is none.
    """

    def __init__(self, norms: NotedNorms, fetched: Callable[[], int]) -> None:
        self._norms = norms
        self._fetched = fetched
        self._fetched_before = 0
        self._reduced: object = None
        self._has_outputs = False
        self.replayed: StepOutcome | None = None

    def on_megatron_step_start(self, step: MegatronStep) -> MegatronStep:
        """Begin a step; a step that is replayed computes nothing."""
        if step.forward_only:
            return step
        self._fetched_before = self._fetched()
        self._norms.forget()
        if self.replayed is None:
            return step
        known = {each.name: getattr(step, each.name) for each in fields(MegatronStep)}
        return _ReplayedStep(**known, outcome=self.replayed)

    def on_megatron_step_end(self, step: MegatronStep, microbatch_outputs: object, reduced: object) -> None:
        """Note the reduced loss when forward and backward are over."""
        if not step.forward_only:
            self._reduced, self._has_outputs = reduced, bool(microbatch_outputs)

    def take(self, succeeded: bool, accumulated: Later[dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        """Take the outcome of the step whose gradients are final now; return what makes plain data of it.

        Args:
            succeeded: whether the update of the step is made.
            accumulated: what was logged and accumulated in this epoch until now; it is not changed any more.
        """
        reduced, has_outputs = copy_of(self._reduced), self._has_outputs
        fetched = self._fetched() - self._fetched_before
        norms = self._norms
        grad_norm = copy_of(norms.grad_norm if succeeded else None)
        num_zeros = copy_of(norms.num_zeros if succeeded else None)
        return lambda: vars(
            StepOutcome(reduced(), has_outputs, fetched, succeeded, grad_norm(), num_zeros(), accumulated())
        )


class KeptReduction:
    """Stands in for the loss reduction of a step that is replayed."""

    def __init__(self, outcome: StepOutcome) -> None:
        self._outcome = outcome

    def reduce(self, microbatch_outputs: object) -> object:
        """Return what the losses were reduced to."""
        return self._outcome.reduced


@dataclass
class _ReplayedStep(MegatronStep):
    """A step that takes its batches from the loader and computes nothing."""

    outcome: StepOutcome = field(default_factory=lambda: StepOutcome(None, False, 0, True, None, None))

    def __call__(self) -> list[Any]:
        for _ in range(self.outcome.fetched):
            next(self.data)
        return [self.outcome.reduced] if self.outcome.has_outputs else []
