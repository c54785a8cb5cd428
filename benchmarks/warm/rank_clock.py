"""A callback that writes down when each step of a rank ends, and the most memory that it took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from common import Marks
from lightning.pytorch import Callback


class RankClock(Callback):
    """Notes the peak of the resident memory before the first step of each generation, and of each step.

    Args:
        directory: where each rank writes its file.
    """

    def __init__(self, directory: str) -> None:
        self._marks = Marks(Path(directory), int(os.environ["RANK"]))
        self._begun = False

    def on_train_batch_start(self, *_: Any) -> None:
        if not self._begun:
            self._begun = True
            self._marks.write("begun", peak=_peak_bytes(), pid=os.getpid())
            _forget_peak()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._marks.write("step", step=trainer.global_step, peak=_peak_bytes(), pid=os.getpid())
        _forget_peak()


def _peak_bytes() -> int:
    """The most resident memory of this process since the kernel was told to forget it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
