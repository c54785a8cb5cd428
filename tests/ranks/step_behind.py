"""Put a rank one optimizer step back, as if it had missed the last update."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from checkpointless.inprocess import active_call_wrapper
from checkpointless.system.environment import FAULTS_ENV
from checkpointless.transfer.tensor_entry import Key

_before: dict[Key, torch.Tensor] = {}  # no attribute, which would be recorded as rank-local state


class StepBehind(Callback):
    """Gives ``rank`` the bits and the commit of the step before when it leaves a run with faults after ``step``.

    (The vote before the update keeps ranks from drifting apart, so no fault brings this about.)

    Args:
        rank: which.
        step: counted from 1.
    """

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def _due(self, making: int) -> bool:
        call = active_call_wrapper()
        disturbed = bool(os.environ.get(FAULTS_ENV)) and call is not None and call.generation == 0
        return disturbed and making == self.step and int(os.environ["RANK"]) == self.rank

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._due(trainer.global_step + 1):
            state: Any = trainer.strategy
            _before.update({key: tensor.clone() for key, tensor in state.journal().state.tensors().items()})

    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._due(trainer.global_step):
            call = active_call_wrapper()
            assert call is not None
            state: Any = trainer.strategy
            with torch.no_grad():
                for key, tensor in state.journal().state.tensors().items():
                    assert not torch.equal(tensor, _before[key]) or not tensor.is_floating_point()
                    tensor.copy_(_before[key])
            call.parameter_update_lock.set_committed(self.step - 1)
