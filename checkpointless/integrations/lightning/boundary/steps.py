"""What recovery asks of the way in which a framework makes a step: its tensors, its update, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from checkpointless.inprocess import ParameterUpdateLock
from checkpointless.integrations.lightning.boundary.outcome import StepOutcome
from checkpointless.state.port import StateTensors
from checkpointless.state.serialization.later import Later
from checkpointless.transfer.tensor_entry import Key


class TrainedTensors(StateTensors, Protocol):
    """The tensors of a model and its optimizer, with what belongs to them and is no tensor."""

    def take_groups(self) -> Callable[[], list[list[dict[str, Any]]]]:
        """Take the values of the optimizers' param groups, learning rates included; return what makes them."""

    def scalers(self) -> list[dict[str, Any] | None]:
        """Return the states of the loss scalers that the optimizers have."""

    def take_modules(self) -> dict[str, Any]:
        """Return what belongs to the modules and is no tensor: which parameters are trained, for example.

        Raises:
            UnrecoverableError: what is trained was changed in a way that a recovery could not repeat.
        """

    def mark_buffers(self) -> None:
        """Note the buffers as they are now, for :meth:`written_buffers`."""

    def written_buffers(self) -> list[Key]:
        """Return the keys of the buffers that were written to since :meth:`mark_buffers`."""

    def plain_state(self) -> dict[Key, dict[str, Any]]:
        """Return the optimizers' non-tensor state, which only an update changes."""

    def spread(self) -> list[Key]:
        """Return the keys of the optimizers' tensors that are DTensors."""

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back what the methods above returned."""

    def put_buffers(self, copies: Mapping[Key, Any]) -> None:
        """Give the modules' buffers the values of ``copies``."""

    def apply_held_update(self) -> None:
        """Apply the update whose final gradients are held, without communication."""

    def settle(self) -> None:
        """Derive before the first step what a recovery derives to other bits than the start. Collective."""

    def derive(self) -> None:
        """Derive what follows from the shards of all ranks. Collective."""


@dataclass(frozen=True)
class Guard:
    """What an update is guarded with (:func:`checkpointless.recovery.guard.guarded_update`).

    Attributes:
        lock: brackets the update.
        step: returns the optimizer step in the making.
        ready: called with the step when its gradients are final, before the vote.
        applied: called with the step inside the lock, when the update is applied.
        committed: called with the step when the lock is released.
        phase: called with the name of a phase and the step.
    """

    lock: ParameterUpdateLock
    step: Callable[[], int]
    ready: Callable[[int], None]
    applied: Callable[[int], None]
    committed: Callable[[int], None]
    phase: Callable[[str, int], None]


class Steps(Protocol):
    """How a framework makes the training steps of one trainer."""

    @property
    def tensors(self) -> TrainedTensors:
        """The tensors of model and optimizer."""

    @property
    def replayed(self) -> StepOutcome | None:
        """The outcome of the committed step that is replayed; None: a step is computed."""

    def guard(self, guard: Guard) -> None:
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
            outcome: the outcome of the step that is replayed.
            put_back: puts back what the step had left when its gradients were final.
            done: puts back the random streams from after the update.
        """

    def update(self, make: Callable[[], object]) -> object:
        """Make the update of a step with ``make``, as the framework does, or replay it."""
