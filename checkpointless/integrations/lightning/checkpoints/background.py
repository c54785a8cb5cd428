"""Megatron's background saves: those that were not finished when the block was left, and their writers' reports."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import CheckpointIO

logger = logging.getLogger(__name__)

_WRITER_ENDS_S = 5.0


@dataclass(frozen=True)
class PendingSaves:
    """Saves that were not finished when the block was left.

    Attributes:
        calls: Megatron's active asynchronous requests, oldest first.
        newest: the number that Megatron's queue assigned last.
    """

    calls: tuple[Any, ...]
    newest: int

    @classmethod
    def of(cls, checkpoint_io: CheckpointIO | None) -> PendingSaves | None:
        """Return the pending saves of ``checkpoint_io``, or None if there are none."""
        found = getattr(checkpoint_io, "async_calls_queue", None)
        calls = tuple(getattr(found, "async_calls", ()))
        return cls(calls, found.call_idx) if calls and found is not None else None

    def numbers(self) -> list[int]:
        """Return the numbers that Megatron's queue gave the saves, which are the same on every rank."""
        return [call.idx for call in self.calls]

    def end(self, numbers: Collection[int | None]) -> None:
        """Stop the writers of the saves with these ``numbers``."""
        for call in self.calls:
            if call.idx not in numbers:
                continue
            process = getattr(call.async_caller, "process", None)
            if process is not None:
                process.kill()
                process.join(_WRITER_ENDS_S)


def report_separately() -> None:
    """Make the writers of the next save report to a separate queue.

    Megatron has one queue for all saves of a rank. With two saves under way, the reports of the second may come
    first, and each save takes the other's reports for its own.
    """
    reports = filesystem_async._results_queue
    manager = getattr(reports, "_manager", None)
    if manager is None:
        return
    try:
        filesystem_async._results_queue = manager.Queue()
    except (OSError, EOFError) as error:  # the process that holds the queues is gone
        logger.warning("the process that checkpoints in the background report to is replaced: %s", error)
        filesystem_async._results_queue = None  # Megatron makes another one


def reset_reports() -> None:
    """Make writers report on a connection with nothing left on it, and the next ones to a separate queue.

    Megatron's writers report to their rank through a queue in a separate process. A rank that was interrupted while
    it asked that process would take the old answer for the answer to its next question, and an old report for the
    report of its next save.
    """
    reports = filesystem_async._results_queue
    if reports is not None:
        vars(reports._tls).pop("connection", None)  # of this thread; multiprocessing makes another one
        report_separately()


def let_go(trainer: pl.Trainer | None) -> None:
    """Drop a trainer's references to model, optimizer and data: what finishes a save refers to the trainer."""
    if trainer is None:
        return
    strategy = trainer.strategy
    for name in ("megatron_parallel", "model", "_model", "_lightning_module"):
        if name in vars(strategy):
            setattr(strategy, name, None)
    strategy.optimizers = []
    trainer.fit_loop._data_fetcher = trainer.fit_loop._combined_loader = None
