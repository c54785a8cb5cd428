"""The callbacks of both sides: when each step ends, and when the fault is caused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from benchmarks.common import Marks
from checkpointless.callbacks import HPFaultInjectionCallback
from checkpointless.faults.inject import FaultInjector
from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import FaultSpec, parse_all


class StepMarks(Callback):
    """Writes down the end of every optimizer step."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is committed; a checkpoint of it is not written yet."""
        self._marks.write("step", step=trainer.global_step)


class MarkingLedger(FaultLedger):
    """Writes down when a fault is handed out: it is caused next."""

    def __init__(self, directory: Path, marks: Marks) -> None:
        super().__init__(directory)
        self._marks = marks

    @override
    def claim(self, index: int, spec: FaultSpec, **about: Any) -> bool:
        """Whether the fault is still to be caused."""
        claimed = super().claim(index, spec, **about)
        if claimed:
            self._marks.write("fault", **about)
        return claimed


def callbacks(faults: list[str], directory: Path, marks: Marks) -> list[Callback]:
    """What both sides add to their trainer."""
    specs = parse_all(faults, world_size=None, max_steps=None)
    injector = FaultInjector(specs, marks.rank, MarkingLedger(directory, marks))
    return [StepMarks(marks), HPFaultInjectionCallback(injector=injector)]
