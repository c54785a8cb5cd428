"""Takes the state of a fit at every moment after a step, and guards every update between two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from checkpointless.inprocess import HPCallWrapper
from checkpointless.integrations.lightning.boundary.epoch_metrics import Accumulated, own_part
from checkpointless.integrations.lightning.boundary.live_state import TrainerLiveState
from checkpointless.integrations.lightning.boundary.steps import Guard, Steps
from checkpointless.integrations.lightning.data.position import DataPosition
from checkpointless.integrations.torch.repeated_steps import repeated_steps
from checkpointless.recovery import CheckpointManager
from checkpointless.state.rank_local.agreement import require_equal_replicas
from checkpointless.state.snapshot import SnapshotPoint

_LOOKED_AT = (2, 3)  # the steps in which is looked at what those before them have left; a first rate may be 0


class StepKeeper:
    """Takes hold of a trainer's model and optimizer, which are built, and guards the update.

    Args:
        trainer: a trainer whose strategy has been set up.
        call: the running wrapper.
        manager: keeps what is taken; None: recovery from memory is switched off, and nothing is taken.
        position: returns where the training stands in its data.
        steps: how the trainer's strategy makes steps.

    Attributes:
        live: the state of the trainer.
        steps: as given.
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
        self.steps = steps
        self.live = TrainerLiveState(trainer, steps.tensors, position)
        self._computed = 0  # steps, of this fit in this generation
        steps.guard(
            Guard(
                lock=call.parameter_update_lock,
                step=lambda: call.steps.making,
                ready=self._gradients_are_final,
                applied=self._applied,
                committed=self._committed,
                phase=call.enter_phase,
            )
        )

    def reached(self, step: int, stage: SnapshotPoint) -> None:
        """Take the state of the moment that the loops have reached: ``stage`` after ``step``.

        Args:
            step: the newest optimizer step, counted over all fits of the block.
            stage: the moment after ``step``.
        """
        manager = self._manager
        if manager is None:
            return
        buffers = self.live.copy_buffers()
        if stage is not SnapshotPoint.ACCUMULATED:  # nobody resumes there
            manager.keep_buffers(step, stage, buffers)  # first: streams of a moment imply its buffers

        def keep(accumulated: Accumulated) -> None:
            manager.store_rng_states(step, None, stage, _own_of(accumulated))

        self.live.reached(step, stage, buffers, keep)

    def _applied(self, step: int) -> None:
        buffers = self.live.applied(step)
        if buffers is not None and self._manager is not None:  # what was kept before the update is not what is now
            self._manager.keep_buffers(step, SnapshotPoint.COMMITTED, buffers)

    def _committed(self, step: int) -> None:
        self._call.steps.committed(step)
        if self._manager is not None and self._manager.tiers_are_kept:
            self._manager.make_copies(step)

    def _gradients_are_final(self, step: int) -> None:
        call, manager = self._call, self._manager
        self._computed += 1
        if manager is not None and call.generation == 0 and self._computed in _LOOKED_AT:
            self.live.require_unchanged()
            require_equal_replicas(self.live, step - 1)
        if call.faults is not None:
            call.enter_phase("before_optimizer", step)
        if manager is not None:
            accumulated = Accumulated(self._trainer)
            buffers = self.live.copy_buffers()
            self.live.ready(step, self.steps.outcome(accumulated), buffers)
            repeated_steps.compute(step, call.steps.loss)
            manager.keep_buffers(step, SnapshotPoint.COMMITTED, buffers)
            manager.store_rng_states(step, call.steps.loss, SnapshotPoint.COMMITTED, _own_of(accumulated))
            manager.replicate_rng_states(step)
        call.parameter_update_lock.mark_ready(step)


def _own_of(accumulated: Accumulated) -> dict[str, Any] | None:
    """Return the part that this rank alone has; None if it is too large to be kept outside of the process."""
    return own_part(accumulated()) if accumulated.has_own else {}
