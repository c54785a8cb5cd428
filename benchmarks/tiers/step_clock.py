"""A callback that writes down how long each step of a rank took, and what its copies take."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback


class StepClock(Callback):
    """Notes when each step begins, and what lies in memory at the end.

    Args:
        directory: where each rank writes its file.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._begun: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._begun.append(time.perf_counter_ns())

    def on_train_end(self, trainer: Any, _: Any) -> None:
        rank = int(os.environ["RANK"])
        shelf = trainer.strategy.checkpoint_manager.copies.stores["neighbor memory"].shelf(1)
        sizes = [(part, copies[0].part.content.nbytes) for save in shelf.values() for part, copies in save.items()]
        part, kept = next((size for of, size in sizes if of == rank), 0), sum(size for _, size in sizes)
        steps = [after - before for before, after in zip(self._begun, self._begun[1:])]
        taken = {"rank": rank, "steps_ns": steps, "part_bytes": part, "kept_bytes": kept}
        taken["rss_bytes"] = psutil.Process().memory_info().rss
        (self._directory / f"clock-{rank}.json").write_text(json.dumps(taken))
