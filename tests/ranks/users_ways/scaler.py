"""Cause faults right behind the update of the loss scaler, where no fault spec reaches."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from megatron.core.utils import get_model_config

from checkpointless.inprocess import active_call_wrapper
from checkpointless.system.environment import RUN_DIR_ENV


class ScaledLoss(Callback):
    """Makes Megatron scale the loss: NeMo 2.7 forgets to ask for it although it has the gradients unscaled."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Ask Megatron to scale the loss."""
        strategy = trainer.strategy
        get_model_config(strategy.megatron_parallel[0]).grad_scale_func = strategy.optimizers[
            0
        ].mcore_optimizer.scale_loss


class FaultBehindScaler(Callback):
    """Makes a rank raise, or die, when the loss scaler has seen the gradients of a step, and notes what it saw.

    Args:
        rank: that it happens to.
        step: in which it happens.
        generation: in which it happens; any later one leaves the step alone.
        after_s: how long the rank waits before it happens.
        kill: whether it dies.
        late: ranks that are still there, behind the scaler, when it happens.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        generation: int = 0,
        after_s: float = 0.0,
        kill: bool = False,
        late: tuple[int, ...] = (),
    ) -> None:
        self._rank, self._step, self._generation = rank, step, generation
        self._after_s, self._kill, self._late = after_s, kill, late

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Listen to the scalers."""
        optimizer = trainer.strategy.optimizers[0].mcore_optimizer
        scaler = getattr(optimizer, "chained_optimizers", [optimizer])[0].grad_scaler
        update = scaler.update

        def updated(found_inf: bool) -> None:
            update(found_inf)
            self._seen(trainer.strategy.global_rank, found_inf, float(scaler.scale))

        scaler.update = updated

    def _seen(self, rank: int, found_inf: bool, scale: float) -> None:
        call = active_call_wrapper()
        assert call is not None
        if (call.steps.making, call.generation) != (self._step, self._generation):
            return
        if rank == self._rank:
            note = Path(os.environ[RUN_DIR_ENV]) / f"scaler-{self._step}.json"
            note.write_text(json.dumps({"found_inf": found_inf, "scale": scale}))
            time.sleep(self._after_s)
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault behind the loss scaler")
        if rank in self._late:
            time.sleep(10 * self._after_s)
