"""Provide callbacks that users add to a training, and those that watch or break it."""

import os
import signal
import time
from functools import partialmethod
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from tests.ranks.users.end import broken, note, run_dir


class Averaging(pl.Callback):
    decay = 0.9

    def __init__(self) -> None:
        self.updates = 0
        self.average: dict[str, torch.Tensor] = {}
        self.history = np.zeros(0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, parameter in trainer.strategy.megatron_parallel.named_parameters():
            average = self.average.setdefault(name, parameter.detach().clone())
            average.mul_(self.decay).add_(parameter.detach(), alpha=1 - self.decay)
        self.updates += 1
        self.history = np.append(self.history, float(next(iter(self.average.values())).sum()))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "average": dict(self.average), "history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = state_dict["updates"]
        self.average = {name: tensor.clone() for name, tensor in state_dict["average"].items()}
        self.history = np.array(state_dict["history"])


class KeepsByHooks(pl.Callback):
    """Keeps its count in the checkpoint itself, as callbacks did before ``state_dict``."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["keeps_by_hooks"] = {"batches": self.batches}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["keeps_by_hooks"]["batches"]


class Pace(pl.Callback):
    """Makes every step wait, so that a long run is not over in a minute."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.seconds)


class EndsSaves(pl.Callback):
    """Ends the saves in the background before a step begins, however long their writers take."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.step:
            trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)


class Breaks(pl.Callback):
    """Fails on rank 1, once in a job, where no phase of a fault spec lies."""

    def __init__(self, fit: int, where: str) -> None:
        how, self.where, number = where.split() if where else ("", "", "-1")
        self.kills = how == "kill"
        self.active = fit == int(number) and os.environ["RANK"] == "1" and not broken(run_dir())

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "setup":
            self._fail()

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.where == "validate" and trainer.state.fn == "validate":
            self._fail()

    def _fail(self) -> None:
        if not self.active or broken(run_dir()):  # an attribute comes back as it was at the last step
            return
        note("broken")
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("broken on purpose")


class Probe(pl.Callback):
    """Writes down which hooks were called, and what a validation found."""

    def __init__(self, fit: int) -> None:
        self.fit = fit

    def _hook(self, name: str, trainer: Any, *args: Any) -> None:
        note("hook", name=f"{name} at step {trainer.global_step}", fit=self.fit)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        note("batch", fit=self.fit, step=trainer.global_step, index=batch_idx)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._hook("on_validation_end", trainer)
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val_loss"):
                note("validation", fit=self.fit, step=trainer.global_step, loader=name, loss=float(value).hex())

    on_train_end: Any = partialmethod(_hook, "on_train_end")
    on_train_epoch_end: Any = partialmethod(_hook, "on_train_epoch_end")
    on_fit_end: Any = partialmethod(_hook, "on_fit_end")
