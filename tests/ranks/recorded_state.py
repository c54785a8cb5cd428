"""Provide a callback with a state, for jobs whose recorded steps are compared."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


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
