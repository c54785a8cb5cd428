"""The model, the batches and the fault of every side, and what is written down: the same code for all of them.

Batches and dropout follow from the step's number and the rank, so that after a fault nothing but parameters and the
optimizer's state has to be brought back. (checkpointless brings random streams back, too; the other sides do not.)
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Marks

RANKS = 4
VICTIM = 2
FAULT_STEP = 20  # the step that the fault interrupts
STEP_S = 0.1  # what a step takes beside this tiny model's own time, as a model that is worth the trouble would
_WIDTH, _BATCH = 256, 16


class Fault(RuntimeError):
    """The exception that is raised on purpose."""


class Training:
    """One rank's model, optimizer and record.

    Args:
        directory: of the run.
        rank: the rank.
        fault: "exception", "killed" or "none".
    """

    def __init__(self, directory: Path, rank: int, fault: str) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.marks = Marks(directory, rank)
        self._fault = fault
        self._fired = directory / "fired"
        torch.manual_seed(1)
        layers = [torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(4 * _WIDTH, _WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        """Return the loss of a step (the first is 1) on this rank's batch, after the time that a step takes."""
        time.sleep(STEP_S)
        torch.manual_seed(RANKS * step + self.rank)
        rows = torch.randn(_BATCH, _WIDTH)
        return torch.nn.functional.mse_loss(model(rows), rows.roll(-1, 1))

    def maybe_fail(self, step: int) -> None:
        """Cause the fault if it is due on this rank, once in a run: between forward and backward pass."""
        if self._fault == "none" or self.rank != VICTIM or step != FAULT_STEP or self._fired.exists():
            return
        self._fired.touch()
        self.marks.write("fault", step=step)
        if self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Fault("on purpose")

    def made(self, step: int, ranks: int) -> None:
        """Write down that this rank has committed a step, and the batches of how many ranks are in it."""
        self.marks.write("step", step=step, ranks=ranks)

    def end(self) -> None:
        """Write down the digest of the parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        self.marks.write("end", digest=digest.hexdigest())
