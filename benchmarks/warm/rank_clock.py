"""A callback that writes down when each step of a rank ends, and the most memory that it took."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

if TYPE_CHECKING:
    from benchmarks.common import Marks
    from benchmarks.warm.memory import forget_peak, peak_bytes
else:  # the ranks may be another checkout's: of this one, only these two folders are on their path
    from common import Marks
    from memory import forget_peak, peak_bytes


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
            self._marks.write("begun", peak=peak_bytes(), pid=os.getpid())
            forget_peak()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._marks.write("step", step=trainer.global_step, peak=peak_bytes(), pid=os.getpid())
        forget_peak()
