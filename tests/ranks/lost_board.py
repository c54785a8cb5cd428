"""Make a rank's board forget its random streams, as if the board were lost with its node."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from checkpointless.inprocess import active_call_wrapper


class LostBoard(Callback):
    """Clears the board of ``ranks`` just before the optimizer step ``step``."""

    def __init__(self, ranks: list[int], step: int) -> None:
        self.ranks = list(ranks)
        self.step = step

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        call = active_call_wrapper()
        if trainer.global_step + 1 == self.step and int(os.environ["RANK"]) in self.ranks:
            assert call is not None
            assert call.board is not None
            call.board.clear_snapshots()
