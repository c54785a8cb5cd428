"""The outcome of a training step, and the replay of the step without computing it.

A rank that was interrupted after the update of a step has committed the step. What Lightning and the callbacks do
at the end of the batch is still to come, and some ranks may have done it in part. All ranks go back to the state
before the step and let Lightning run through it again, with the outcome in place of forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from nemo.lightning.megatron_parallel import MegatronStep

from checkpointless.megatron.update import NotedNorms
from checkpointless.serialization import state_tree


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a training step.

    Attributes:
        reduced: what the loss reduction returned.
        has_outputs: whether this pipeline stage had losses to reduce.
        fetched: how many batches the step took from the loader.
        succeeded: whether the update was made (with fp16, not if a gradient overflowed).
        grad_norm: the norm of all gradients, or None.
        num_zeros: the number of gradients that are zero, or None.
        accumulated: what was logged and accumulated in this epoch up to the update of the step; None: not known.
    """

    reduced: object
    has_outputs: bool
    fetched: int
    succeeded: bool
    grad_norm: float | None
    num_zeros: float | None
    accumulated: dict[str, Any] | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value if name == "accumulated" else state_tree.copy(value) for name, value in plain.items()}


class StepOutcomes:
    """A Megatron callback that notes the outcome of each training step.

    Args:
        norms: the norms that are noted of the optimizer.
        fetched: returns how many batches the loader's fetcher has counted.
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

    def outcome(self, succeeded: bool, accumulated: dict[str, Any]) -> StepOutcome:
        """Return the outcome of the step whose gradients are final now.

        Args:
            succeeded: whether the update of the step is made.
            accumulated: what was logged and accumulated in this epoch until now; it is not changed any more.
        """
        return StepOutcome(
            self._reduced,
            self._has_outputs,
            self._fetched() - self._fetched_before,
            succeeded,
            self._norms.grad_norm if succeeded else None,
            self._norms.num_zeros if succeeded else None,
            accumulated,
        )

    @contextmanager
    def replay(self, outcome: StepOutcome) -> Iterator[None]:
        """Give training steps ``outcome`` while the context lasts; they compute nothing."""
        self.replayed = outcome
        try:
            yield
        finally:
            self.replayed = None


class KeptReduction:
    """Stands in for the loss reduction of a step that is replayed.

    Args:
        outcome: the outcome of the step.
    """

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


def with_own_loss(outcome: StepOutcome, loss: float | None) -> StepOutcome:
    """Return a peer's ``outcome`` with this rank's loss, if it was kept: a reduction need not be over all ranks."""
    reduced = outcome.reduced
    if loss is None or not isinstance(reduced, torch.Tensor) or reduced.dim():
        return outcome
    return StepOutcome(
        torch.full_like(reduced, loss),
        outcome.has_outputs,
        outcome.fetched,
        outcome.succeeded,
        outcome.grad_norm,
        outcome.num_zeros,
        outcome.accumulated,
    )
