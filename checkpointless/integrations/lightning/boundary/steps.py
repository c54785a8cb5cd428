"""What recovery asks of the way in which a framework makes a step: its tensors, its update, and its replay.

A rank that was interrupted after the update of a step has committed the step. What Lightning and the callbacks do
at the end of the batch is still to come, and some ranks may have done it in part. All ranks go back to the state
before the step and let Lightning run through it again, with the outcome in place of forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.port import TrainingState
from checkpointless.state.serialization.state_tree import Later


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a training step.

    Attributes:
        has_outputs: whether this pipeline stage had losses to reduce.
        fetched: how many batches the step took from the loader.
        succeeded: whether the update was made (with fp16, not if a gradient overflowed).
        grad_norm: the norm of all gradients, or None.
        num_zeros: the number of gradients that are zero, or None.
        accumulated: what was logged and accumulated in this epoch up to the update of the step; None: not known.
        state: what hooks of callbacks, module and data module had changed by then, as a framework's steps keep it;
            None: the hooks are called again.
    """

    reduced: object
    has_outputs: bool
    fetched: int
    succeeded: bool
    grad_norm: float | None
    num_zeros: float | None
    accumulated: dict[str, Any] | None = None
    state: dict[str, Any] | None = None


def with_own_loss(outcome: StepOutcome, loss: float | None) -> StepOutcome:
    """Return a peer's ``outcome`` with this rank's loss, if it was kept: a reduction need not be over all ranks."""
    reduced = outcome.reduced
    if loss is None:
        return outcome
    if isinstance(reduced, torch.Tensor) and not reduced.dim():
        return replace(outcome, reduced=torch.full_like(reduced, loss))
    output = (outcome.state or {}).get("output", {})
    if isinstance(output.get("loss"), torch.Tensor):
        output = {**output, "loss": torch.full_like(output["loss"], loss)}
        return replace(outcome, state={**(outcome.state or {}), "output": output})
    return outcome


class Steps(Protocol):
    """How a framework makes the training steps of one trainer."""

    @property
    def tensors(self) -> TrainingState:
        """The tensors of model and optimizer."""

    @property
    def replayed(self) -> StepOutcome | None:
        """The outcome of the committed step that is replayed; None: a step is computed."""

    def guard(self, guard: UpdateGuard) -> None:
        """Guard every update from now on."""

    def outcome(self, accumulated: Later[dict[str, Any]]) -> tuple[bool, Callable[[], dict[str, Any]]]:
        """Take the outcome of the step whose gradients are final now.

        Args:
            accumulated: what was logged and accumulated in this epoch until now; it is not changed any more.

        Returns:
            Whether the update is made, and what makes plain data of the :class:`StepOutcome`.
        """

    def replay(
        self, outcome: StepOutcome, put_back: Callable[[], None], done: Callable[[], None]
    ) -> AbstractContextManager[None]:
        """Give training steps ``outcome`` while the context lasts; they compute nothing.

        Args:
            done: puts back the random streams from after the update.
        """

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step with ``make``, as the framework does, or replay it."""
