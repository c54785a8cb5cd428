"""The aborts of what a framework's trainer runs beside the main thread: data-loader workers, checkpoint writers."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from checkpointless.inprocess.abort.base import Abort
from checkpointless.inprocess.data_workers.loader_workers import end_workers
from checkpointless.inprocess.state import HPState

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


class TrainerParts(Protocol):
    """Where a framework's trainer keeps what an abort has to stop."""

    def loader_iterators(self, trainer: object) -> Iterable[_MultiProcessingDataLoaderIter]:
        """Return torch's multiprocessing iterators that are in use."""

    def stop_saves(self, trainer: object) -> None:
        """Stop asynchronous checkpoint writers, unless the trainer keeps their saves and finishes them later."""


logger = logging.getLogger(__name__)

_FRAMEWORKS = "checkpointless.frameworks"  # group of entry points that register trainers' parts
_known: dict[str, TrainerParts] = {}


def register_trainer_parts(framework: str, parts: TrainerParts) -> None:
    """Register how to find the parts of a framework's trainer.

    Args:
        framework: the framework's name; registering a name again replaces what it stood for.
        parts: finds nothing in a trainer of another framework.
    """
    _known[framework] = parts


def _load_frameworks() -> None:
    """Have the installed package register the frameworks that it knows, unless an import has done so."""
    for entry in entry_points(group=_FRAMEWORKS):
        entry.load()()
    if not _known:
        logger.warning("data-loader workers and checkpoint writers are not stopped: reinstall checkpointless")


class TrainerAbort(Abort):
    """An abort that acts on the running trainer, once there is one."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[object] | None = None

    def register_attributes(self, trainer: object) -> None:
        """Keep a weak reference to the running trainer."""
        if not _known:
            _load_frameworks()
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> object | None:
        """The running trainer, or None."""
        return self._trainer() if self._trainer is not None else None


class HPDataLoaderAbort(TrainerAbort):
    """Stops the data-loader workers, which frees a main thread that waits for a batch and leaves nothing behind."""

    def __call__(self, state: HPState) -> None:
        for parts in _known.values():
            for iterator in parts.loader_iterators(self.trainer):
                end_workers(iterator)


class HPCheckpointingAbort(TrainerAbort):
    """Stops asynchronous checkpoint writers, unless the strategy keeps their saves and finishes them later.

    A save that is not finished is not a checkpoint.
    """

    def __call__(self, state: HPState) -> None:
        for parts in _known.values():
            parts.stop_saves(self.trainer)
