"""The front end of a trainer: guards every update, and captures the rest of what Lightning keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.integrations.lightning.boundary.epoch_metrics import Accumulated, own_part
from checkpointless.integrations.lightning.boundary.kinds import ACCUMULATED, of_save_hooks, take_state
from checkpointless.integrations.lightning.boundary.plain_attributes import kept_states
from checkpointless.integrations.lightning.boundary.steps import Steps
from checkpointless.integrations.lightning.data.position import DataPosition, begun_at
from checkpointless.integrations.lightning.data.stateful import without_worker_seeds
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.recovery import CheckpointManager
from checkpointless.recovery.guard import UpdateGuard
from checkpointless.state.journal import Captured, FrontEnd, StepBefore, StepJournal
from checkpointless.state.port import DATA, SnapshotPoint
from checkpointless.state.rank_local.agreement import require_equal_replicas

_LOOKED_AT = (2, 3)  # the steps in which is looked at what those before them have left; a first rate may be 0


class StepKeeper(FrontEnd):
    """Takes hold of a trainer's model and optimizer, which are built, and guards the update.

    Args:
        manager: keeps what is captured; None: recovery from memory is switched off, and nothing is captured.
        position: returns where the training stands in its data.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        call: HPCallWrapper,
        manager: CheckpointManager | None,
        position: Callable[[], DataPosition],
        steps: Steps,
    ) -> None:
        self._trainer = trainer
        self._call = call
        self._manager = manager
        self._position = position
        self.steps = steps
        self.journal = StepJournal(steps.tensors, manager or CheckpointManager(), self)
        self._computed = 0  # steps, of this fit in this generation
        steps.guard(UpdateGuard(call, self.journal if manager is not None else None, committed=self._copy))

    def _copy(self, step: int) -> None:
        if self._manager is not None and self._manager.tiers_are_kept:
            self._manager.make_copies(step)

    # --- what the journal asks for --------------------------------------------------------------------------------

    @override
    def ready(self, step: int) -> Captured:
        """Capture the outcome of ``step``, whose gradients are final.

        Raises:
            UnrecoverableError: something other than updates has changed parameters, or replicas have parted.
        """
        self._computed += 1
        if self._call.generation == 0 and self._computed in _LOOKED_AT:
            reason = self.journal.changed()
            if reason:  # a fault after that would find ranks whose state is that of no step
                raise UnrecoverableError(reason)
            require_equal_replicas(self.journal.state, step - 1)
        accumulated = Accumulated(self._trainer)
        succeeded, outcome = self.steps.outcome(accumulated)
        loss = self._call.steps.loss
        repeated_steps.compute(step, loss)
        return Captured(lambda: {"outcome": outcome()}, _own_of(accumulated), loss, not succeeded)

    @override
    def committed(
        self, step: int, ready: Captured, before: StepBefore | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Return what the commit of ``step`` leaves: what the step changed, and the rest as it was before it."""
        if before is None:
            return None
        base, taken = before
        begun = take_state(self._trainer)()["sampler"] if base is SnapshotPoint.LOADED else None
        if base is SnapshotPoint.COMMITTED:
            taken()  # otherwise each step would hold all those before it

        def objects() -> dict[str, Any]:
            made = {**taken(), **ready.objects(), "base": int(base)}
            if base is SnapshotPoint.LOADED:
                made["sampler"] = begun_at(made["sampler"], begun)
            return made

        return objects

    @override
    def reached(self, step: int, point: SnapshotPoint) -> Captured:
        """Capture what the trainer has at ``point`` after ``step``."""
        accumulated, position, state = Accumulated(self._trainer), self._position(), take_state(self._trainer)

        def objects() -> dict[str, Any]:
            made = state()
            return {
                "checkpoint": made["checkpoint"],
                "kinds": {**made["kinds"], ACCUMULATED: accumulated()},
                "sampler": made["sampler"],
                "data": tuple(position),
                "outcome": None,
                "base": None,
            }

        return Captured(objects, _own_of(accumulated))

    @override
    def own_parts(self, objects: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the states of data loaders, data module, callbacks and module, by name."""
        checkpoint = objects["checkpoint"]
        loops = checkpoint["loops"] or {}
        loaders = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
        kept = kept_states(self._trainer)
        parts: dict[str, Any] = {
            f"the state of {key}": state for key, state in checkpoint["callbacks"].items() if key not in kept
        }
        if loaders:
            parts[f"{DATA} (loaders)"] = without_worker_seeds(loaders)
        datamodule = getattr(self._trainer, "datamodule", None)
        if type(datamodule).__qualname__ in checkpoint:
            parts[f"{DATA} ({type(datamodule).__qualname__})"] = checkpoint[type(datamodule).__qualname__]
        for key, value in of_save_hooks(self._trainer, checkpoint).items():
            parts[f"what on_save_checkpoint puts into checkpoint[{key!r}]"] = value
        return parts


def _own_of(accumulated: Accumulated) -> dict[str, Any] | None:
    """Return the part that this rank alone has; None if it is too large to be kept outside of the process."""
    return own_part(accumulated()) if accumulated.has_own else {}
