"""What the recovery needs from the framework side, as a small protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from checkpointless.state.port import StateTensors
from checkpointless.state.snapshot import SnapshotPoint, StepSnapshot
from checkpointless.transfer.tensor_entry import Key

DATA = "the state of the training data"  # prefix of the names of parts that must not come from a peer


class LiveState(StateTensors, Protocol):
    """A rank's training state where it lives: its tensors, and what the trainer keeps beside them."""

    def moments(self, step: int) -> Mapping[SnapshotPoint, StepSnapshot]:
        """Return the state beside parameters and optimizer at every moment after ``step`` that can be resumed at.

        No moment contains what the next step has already changed, or what is half done.
        """

    def own_buffers(self, step: int) -> Mapping[SnapshotPoint, Mapping[Key, torch.Tensor]]:
        """Return this rank's own buffers at every moment after ``step`` that can be resumed at.

        They are also known if this rank's update of ``step`` has failed or is to come.
        """

    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parts of a moment's objects, by name, that may differ between ranks: no peer has a lost one."""

    def resumed(self, step: int, stage: SnapshotPoint, objects: dict[str, Any]) -> None:
        """Note that tensors and objects after ``step`` at ``stage`` are in place; :meth:`moments` has them now."""

    def apply_held_update(self) -> None:
        """Apply the optimizer update whose final gradients are held, without communication."""

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back the part of a moment's objects that belongs to model and optimizer."""

    def derive(self) -> None:
        """Derive what follows from the shards, once all shards of the job are at one step. Collective."""


@runtime_checkable
class ChangingState(Protocol):
    """A state that code beside the update can change (that of a loop of one's own)."""

    def changed(self) -> str:
        """Return why the tensors are not those of the newest moment; "" if nothing is known of it."""


class Built(Protocol):
    """What of a training can stay built over a fault, in a process that lives through it."""

    def unfit(self) -> str | None:
        """Return why it cannot stay, in a phrase; None: it can."""


@runtime_checkable
class BuiltState(Protocol):
    """A state whose model and optimizer can stay built."""

    @property
    def built(self) -> Built | None:
        """What can stay built; None: nothing."""


class LiveStrategy(Protocol):
    """A trainer's strategy that can be recovered, as far as the recovery uses it."""

    def live_state(self) -> LiveState:
        """Return the state of the training."""

    def restored_from_memory(self, objects: dict[str, Any]) -> None:
        """Note that the state is in place, and that ``objects`` is its non-tensor part."""


class LiveTrainer(Protocol):
    """A trainer whose strategy is a :class:`LiveStrategy`, which the frameworks' own types do not know."""

    @property
    def strategy(self) -> object:
        """The strategy."""
