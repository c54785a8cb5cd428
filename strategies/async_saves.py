"""Checkpoints that are written in the background while a fault comes.

A writer is a process of its own with a copy of what it writes, so a fault of a rank does not stop it. If all ranks
still have theirs, the save is finished in the next generation like any other. If one was lost with its rank, no
part is of use, and a warning says so.
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.recovery.exchange import all_gather_json

logger = logging.getLogger(__name__)

_WRITER_ENDS_S = 5.0
_REMOVE = ModelCheckpoint.__dict__["_remove_unfinished_checkpoints"]


@dataclass(frozen=True)
class PendingSaves:
    """Saves that were not finished when the block was left.

    Attributes:
        calls: Megatron's active asynchronous requests, oldest first.
        newest: the number that Megatron's queue gave last.
    """

    calls: tuple[Any, ...]
    newest: int

    @classmethod
    def of(cls, checkpoint_io: Any) -> PendingSaves | None:
        """Those of ``checkpoint_io``; None if there are none."""
        found = getattr(checkpoint_io, "async_calls_queue", None)
        calls = tuple(getattr(found, "async_calls", ()))
        return cls(calls, found.call_idx) if calls and found is not None else None

    def numbers(self) -> list[int]:
        """What Megatron's queue numbered them with, the same on every rank."""
        return [call.idx for call in self.calls]

    def end(self) -> None:
        """Stop the writers, and forget what they reported: the next save would take it for its own."""
        for call in self.calls:
            process = getattr(call.async_caller, "process", None)
            if process is not None:
                process.kill()
                process.join(_WRITER_ENDS_S)
        results = filesystem_async._results_queue
        while results is not None:
            try:
                results.get_nowait()
            except queue.Empty:
                return


def go_on(pending: PendingSaves | None, strategy: Any) -> None:
    """Hand the saves over to the new trainer, which finishes them. Collective.

    Args:
        pending: this rank's; None if it has none, as a new process.
        strategy: of the new trainer.
    """
    mine = pending.numbers() if pending is not None else []
    numbers = all_gather_json(mine)
    if not any(numbers):
        return
    found = getattr(strategy.checkpoint_io, "async_calls_queue", None)
    if found is not None and all(each == mine for each in numbers) and pending is not None:
        found.async_calls.extend(pending.calls)
        found.call_idx = pending.newest
        return
    logger.warning("a checkpoint that was being written in the background is lost with the writer of another rank")
    if pending is not None:
        pending.end()


def leave_unfinished(leave: bool) -> None:
    """Say whether NeMo may remove unfinished checkpoints when a trainer is set up: not while they are written."""
    name = "_remove_unfinished_checkpoints"
    setattr(ModelCheckpoint, name, staticmethod(lambda *_: None) if leave else _REMOVE)


def let_go(trainer: Any) -> None:
    """What finishes a save refers to its trainer: have that refer no longer to model, optimizer and data."""
    if trainer is None:
        return
    strategy = trainer.strategy
    for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
        if name in vars(strategy):
            setattr(strategy, name, None)
    strategy.optimizers = []
    trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None
