"""The data that a fit trains on: where it stands, and how a loader that was rebuilt is brought there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from checkpointless.integrations.compat.lightning import Stateful
from checkpointless.integrations.lightning.data.passes import Starts, one_pass
from checkpointless.integrations.lightning.data.position import (
    DataPosition,
    TrackedSampler,
    go_on_counting,
    keeps_its_position,
    track,
)
from checkpointless.integrations.lightning.data.sampler_state import keep_own_state
from checkpointless.integrations.lightning.data.stateful import DrawnOrder, begin_anew, repeat_order

if TYPE_CHECKING:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    from checkpointless.integrations.compat.lightning import DataFetcher


class _CountingLoop(Protocol):
    """Lightning's loop over the steps of an epoch, made resumable."""

    not_delivered: int


class _FitLoop(Protocol):
    """Lightning's loop over epochs, made resumable."""

    _data_fetcher: DataFetcher | None
    _combined_loader: CombinedLoader | None

    @property
    def epoch_loop(self) -> _CountingLoop:
        """The loop over the steps of an epoch."""


class TrainingData:
    """Follows the training loader of a trainer, whichever was made last."""

    def __init__(self) -> None:
        self._tracked: TrackedSampler | None = None  # None: the loader, or the dataset alone, knows its position
        self._stateful: Iterable[object] | None = None  # a loader that knows its position
        self._order: DrawnOrder | None = None  # of such a loader, if it does not know that

    def position(self, fit_loop: _FitLoop) -> DataPosition:
        """Return where the training stands in its data."""
        fetcher = fit_loop._data_fetcher
        fetched = fetcher.fetched if fetcher is not None else 0
        tracked = self._tracked
        if self._order is not None:  # a point is reached, so the training goes on
            self._order.resumed()
        return DataPosition(
            fetched,
            fetched - fit_loop.epoch_loop.not_delivered,
            tracked.began_at if tracked is not None else None,
            tracked.consumed if tracked is not None else None,
            length=fetcher.length if fetcher is not None else None,
            length_at_start=tracked.length_at_start if tracked is not None else None,
            ahead=len(getattr(fetcher, "batches", ())),
        )

    def fetched(self, fit_loop: _FitLoop) -> int:
        """Return how many batches Lightning's fetcher has counted."""
        fetcher = fit_loop._data_fetcher
        return fetcher.fetched if fetcher is not None else 0

    def made(self, loader: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
        """Follow a training loader that has just been made.

        Args:
            position: where the training stands; None: at the beginning.
        """
        self._tracked = self._order = self._stateful = None
        if keeps_its_position(loader):
            self._stateful, self._order = loader, repeat_order(loader, starts, position)
        else:
            self._tracked = track(loader, starts, position)
        _repeat_items(loader, starts, position)

    def set_up(self) -> None:
        """Note that the fit is set up: Lightning has asked how many batches there are."""
        if self._tracked is not None:
            self._tracked.set_up()

    def begin_epoch(self) -> None:
        """Begin an epoch; the one before it was over when it was resumed."""
        if self._tracked is not None:
            self._tracked.begin_epoch()
        self._begin_anew()

    def begin_epoch_at(self, position: DataPosition) -> None:
        """Let the epoch that begins where the loops resume begin at ``position``."""
        if self._tracked is not None:
            self._tracked.begin_at(position.consumed)
        self._begin_anew()

    def _begin_anew(self) -> None:
        if self._stateful is not None:
            begin_anew(self._stateful)
        if self._order is not None:
            self._order.begin_anew()

    def resume_at(self, position: DataPosition, fit_loop: _FitLoop) -> None:
        """Let an epoch that has begun in an earlier generation continue at ``position``.

        Args:
            fit_loop: Lightning's loop over epochs, whose loader and iterator were rebuilt.
        """
        fetcher: Any = fit_loop._data_fetcher
        combined = cast("CombinedLoader", fit_loop._combined_loader)
        self._take_what_was_delivered(combined.flattened, fetcher, position)
        fetcher.fetched, fetcher.length = position.fetched, position.length
        fetcher.done = fetcher.length is not None and fetcher.fetched >= fetcher.length
        go_on_counting(fetcher, position)
        fit_loop.epoch_loop.not_delivered = position.fetched - position.delivered

    def _take_what_was_delivered(self, loaders: Iterable[object], fetcher: Any, position: DataPosition) -> None:
        """Advance an iterator whose batches only the dataset knows past those that were delivered.

        Lightning's fetcher may have fetched some ahead to learn where they end; it has as many again.
        """
        if self._tracked is not None or any(keeps_its_position(loader) for loader in loaders):
            return
        ahead: list[Any] = getattr(fetcher, "batches", [])
        for _ in range(position.delivered - position.ahead):
            if ahead:
                ahead.pop(0)
            else:
                next(fetcher.iterator)
        while len(ahead) < position.ahead:
            ahead.append(next(fetcher.iterator))  # as many as the iterator had, so it does not end here


# --- Iterable datasets that keep no position ----------------------------------------------------------------------


def _repeat_items(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
    """Have the iterable dataset of ``loader`` give the same items when it is gone through once more after a fault.

    Nothing is done if data-loader workers go through it, whose streams follow from the number of the batch, or if
    it or its loader keeps its position.

    Args:
        position: where the training stands; None: at the beginning.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return
    if loader.num_workers > 0 or isinstance(loader, Stateful) or isinstance(loader.dataset, Stateful):
        return
    keep_own_state(loader)
    dataset, make = loader.dataset, loader._get_iterator
    repeats = iter([position is not None and position.within and position.delivered > 0])  # the first pass alone

    def begin() -> Any:
        again = next(repeats, False)
        if isinstance(dataset, IterDataPipe):  # torch does more with these
            iterator: Any = make()
            fetcher = iterator._dataset_fetcher
            fetcher.dataset_iter = one_pass(fetcher.dataset_iter, starts, again, owner=dataset)
            return iterator
        # What torch takes for the dataset draws nothing before its first item is asked for.
        object.__setattr__(loader, "dataset", one_pass(dataset, starts, again))  # torch forbids a plain assignment
        try:
            iterator = make()
        finally:
            object.__setattr__(loader, "dataset", dataset)
        iterator._dataset = iterator._dataset_fetcher.dataset = dataset
        return iterator

    loader._get_iterator = begin  # type: ignore[method-assign]
