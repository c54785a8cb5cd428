"""What recovery asks of the way in which a framework makes a step: its tensors, its update, and its replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from checkpointless.integrations.lightning.boundary.outcome import StepOutcome
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.port import TrainingState
from checkpointless.state.serialization.later import Later


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
