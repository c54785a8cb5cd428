"""A callback that marks each step of a rank, and leaves the processor to others between steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from benchmarks.common import Marks

_NAP_S = 0.01


class StepMarks(Callback):
    """Marks the end of each step.

    Args:
        directory: where the marks go.
        pause_s: how long to wait after each step: a job on GPUs leaves most processors of its node idle.
    """

    def __init__(self, directory: str, pause_s: float) -> None:
        self._marks = Marks(Path(directory), int(os.environ["RANK"]))
        self._pause_s = pause_s

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Mark, then wait in short naps, which a fault can interrupt."""
        self._marks.write("step", step=trainer.global_step, pid=os.getpid())
        until_s = time.monotonic() + self._pause_s
        while time.monotonic() < until_s:
            time.sleep(_NAP_S)
