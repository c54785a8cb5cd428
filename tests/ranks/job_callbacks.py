"""Provide callbacks that recipes of the tests take."""

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from checkpointless.inprocess import active_call_wrapper

AT_BATCH = 2  # where Waits does so


class Average(Callback):
    """Averages the losses; with ``wrong_from`` it is another average from that step on."""

    def __init__(self, wrong_from: int | None = None) -> None:
        self.wrong_from = wrong_from
        self.value = torch.zeros(())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.value = 0.9 * self.value + 0.1 * float(outputs["loss"])
        if self.wrong_from is not None and trainer.global_step >= self.wrong_from:
            self.value = self.value + 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class LostBoard(Callback):
    """Clears the board of ``ranks`` just before an optimizer step, as if it were lost with its node."""

    def __init__(self, ranks: list[int], step: int) -> None:
        self.ranks = list(ranks)
        self.step = step

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        call = active_call_wrapper()
        if trainer.global_step + 1 == self.step and int(os.environ["RANK"]) in self.ranks:
            assert call is not None
            assert call.board is not None
            call.board.clear_snapshots()


class SlowToRecord(Callback):
    """Makes a rank wait while its callbacks' state is recorded, when the step's parameters are whole already."""

    def __init__(self, rank: int, step: int, seconds: float) -> None:
        self._rank, self._step, self._seconds = rank, step, seconds
        self._trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return no state; take long if the recorder asks for it."""
        call = active_call_wrapper()
        is_first = call is not None and call.generation == 0
        trainer = self._trainer
        if is_first and (trainer.global_rank, trainer.global_step) == (self._rank, self._step) and _is_recording():
            time.sleep(self._seconds)
        return {}


def _is_recording() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_callback_digests":
            return True
    return False


class Waits(Callback):
    """Makes the third step last until the ranks are to pause."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        call, deadline_s = active_call_wrapper(), time.monotonic() + 150
        assert call is not None
        while trainer.global_step == AT_BATCH and call.generation == 0 and not call.pause.is_wanted:
            assert time.monotonic() < deadline_s, "nobody moves a node"
            call.beat()
            time.sleep(0.005)
