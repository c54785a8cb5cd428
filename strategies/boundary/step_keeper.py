"""Takes the state of a fit at every moment after a step, and guards every update between two of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl

from checkpointless.inprocess import HPCallWrapper
from checkpointless.megatron.update import GuardedUpdate, NotedNorms
from checkpointless.recovery import CheckpointManager
from checkpointless.recovery.moment import Stage
from checkpointless.strategies.boundary.epoch_metrics import own_part, take_accumulated
from checkpointless.strategies.boundary.kinds import ACCUMULATED
from checkpointless.strategies.boundary.live_state import TrainerLiveState
from checkpointless.strategies.boundary.replay import StepOutcomes
from checkpointless.strategies.data.position import DataPosition
from checkpointless.strategies.data.training import TrainingData

if TYPE_CHECKING:
    from checkpointless.strategies.boundary.loops import ResumableFitLoop


class StepKeeper:
    """Takes hold of a trainer's model and optimizer, which are built, and guards the update.

    Args:
        trainer: a trainer whose strategy has been set up.
        call: the running wrapper.
        manager: keeps what is taken; None: recovery from memory is switched off, and nothing is taken.
        data: the training data.

    Attributes:
        live: the state of the trainer.
        outcomes: the outcomes of the training steps.
    """

    def __init__(
        self, trainer: pl.Trainer, call: HPCallWrapper, manager: CheckpointManager | None, data: TrainingData
    ) -> None:
        self._trainer = trainer
        self._call = call
        self._manager = manager
        strategy: Any = trainer.strategy
        optimizer = strategy.optimizers[0].mcore_optimizer
        self._data = data
        self.live = live = TrainerLiveState(trainer, self._position)
        self.outcomes = StepOutcomes(NotedNorms(optimizer), lambda: self._position().fetched)
        strategy.megatron_parallel.callbacks.add(self.outcomes)
        self._guard = GuardedUpdate(
            optimizer,
            models=strategy.megatron_parallel,
            lock=call.parameter_update_lock,
            step=lambda: call.steps.making,
            ready=self._gradients_are_final,
            applied=live.applied,
            committed=self._committed,
            phase=call.enter_phase,
        )

    def _position(self) -> DataPosition:
        return self._data.position(cast("ResumableFitLoop", self._trainer.fit_loop))

    def reached(self, step: int, stage: Stage) -> None:
        """Take the state of the moment that the loops have reached: ``stage`` after ``step``.

        Args:
            step: the newest optimizer step, counted over all fits of the block.
            stage: the moment after ``step``.
        """
        manager = self._manager
        if manager is None:
            return
        buffers = self.live.copy_buffers()
        manager.keep_buffers(step, stage, buffers)  # first: streams of a moment imply its buffers
        store = partial(manager.store_rng_states, step, stage=stage)
        self.live.reached(step, stage, buffers, lambda objects: store(own=own_part(objects["kinds"][ACCUMULATED])))

    def _committed(self, step: int) -> None:
        self._call.committed(step)
        if self._manager is not None:
            self._manager.make_copies(step)

    def _gradients_are_final(self, step: int) -> None:
        call, manager = self._call, self._manager
        call.enter_phase("before_optimizer", step)
        if manager is not None:
            accumulated = take_accumulated(self._trainer)
            buffers = self.live.copy_buffers()
            self.live.ready(step, self.outcomes.outcome(not self._guard.overflow, accumulated), buffers)
            manager.keep_buffers(step, Stage.COMMITTED, buffers)
            manager.store_rng_states(step, loss=call.steps.loss, own=own_part(accumulated))
            manager.replicate_rng_states(step)
        call.parameter_update_lock.mark_ready(step)
