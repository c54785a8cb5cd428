"""Iterable datasets that do not know where they stand, and are gone through once more after a fault.

They give the same items only if these do not come from the random streams of the training process, from which the
training draws in between. What such a dataset draws before its first item is drawn again; one that draws for later
items is refused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.rng import RngStates
from checkpointless.strategies.data.contents import Contents
from checkpointless.strategies.data.passes import moved, without_own
from checkpointless.strategies.data.position import DataPosition, Starts, keep_own_state
from checkpointless.strategies.data.sampler_state import samplers_within

#: Of a pass, so many items are looked at.
_LOOKED_AT = 10_000
_DRAWS = (
    "the dataset {} draws random numbers in the training process while it is gone through, so that it would give "
    "other items after a fault: let a worker draw them (num_workers=1), draw from a generator that the dataset has "
    "for itself, or give it state_dict and load_state_dict"
)


def repeat_items(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
    """Have the iterable dataset of ``loader`` give the same items when it is gone through once more after a fault.

    Nothing is done if data-loader workers go through it, whose streams follow from the number of the batch, or if
    it keeps its position.

    Args:
        loader: a training loader.
        starts: keeps the random streams at the beginning of each pass.
        position: where the training stands; None: at the beginning.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return
    if loader.num_workers > 0 or isinstance(loader.dataset, _Stateful):
        return
    if isinstance(loader, _Stateful):  # it goes through the dataset itself, when it is told its position
        loader._get_iterator = functools.partial(_begin_looked_at, loader._get_iterator)  # type: ignore[method-assign]
        return
    keep_own_state(loader)
    passes = _Passes(loader.dataset, starts, position)
    loader._get_iterator = functools.partial(_begin, loader._get_iterator, loader, passes)  # type: ignore[method-assign]


def _begin_looked_at(make: Callable[[], Any]) -> Any:
    """Make a loader's iterator that looks whether items come from the random streams."""
    iterator = make()
    fetcher = iterator._dataset_fetcher
    if not isinstance(fetcher.dataset_iter, _Stateful):
        fetcher.dataset_iter = _looked_at(fetcher.dataset_iter, fetcher.dataset)
    return iterator


def _begin(make: Callable[[], Any], loader: Any, passes: _Passes) -> Any:
    """Make a loader's iterator that begins a pass when its first item is asked for."""
    dataset = loader.dataset
    if isinstance(dataset, IterDataPipe):  # torch does more with these
        iterator = make()
        iterator._dataset_fetcher.dataset_iter = passes.begin(iterator._dataset_fetcher.dataset_iter)
        return iterator
    object.__setattr__(loader, "dataset", _Late(passes.begin(dataset)))  # torch forbids a plain assignment
    try:
        iterator = make()
    finally:
        object.__setattr__(loader, "dataset", dataset)
    iterator._dataset = iterator._dataset_fetcher.dataset = dataset
    return iterator


class _Late(IterableDataset[Any]):
    """Stands in the place of a dataset while torch asks for its iterator, which may draw random numbers already.

    Args:
        items: the iterator that torch gets.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items


class _Passes:
    """The passes over an iterable dataset, the first of which may be one that was begun before a fault.

    Args:
        dataset: the dataset.
        starts: keeps the random streams at the beginning of each pass.
        position: where the training stands; None: at the beginning.
    """

    def __init__(self, dataset: Any, starts: Starts, position: DataPosition | None) -> None:
        self._dataset = dataset
        self._starts = starts
        self._repeats = position is not None and position.within and position.delivered > 0
        self._contents = Contents(samplers_within(dataset), lambda: iter(dataset))

    def begin(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a pass, which begins when the first is asked for.

        Args:
            dataset: the dataset, or an iterator over it that has drawn nothing yet.

        Raises:
            UnrecoverableError: the dataset draws random numbers for an item behind the first.
        """
        now = RngStates.capture()
        start = self._starts.data_start() if self._repeats else None
        if not self._repeats:
            self._starts.keep_data_start(now)
            self._contents.begins(now)
        elif start is not None:
            start.restore()
        noted = self._contents.noted if not self._repeats else iter
        self._repeats = False
        items = iter(dataset)
        first = list(itertools.islice(items, 1))
        if start is not None:
            without_own(now).restore()
        yield from noted(itertools.chain(first, _looked_at(items, self._dataset)))


def _looked_at(items: Iterator[Any], dataset: object) -> Iterator[Any]:
    """Yield ``items``, unless the rank's random streams move when one is asked for.

    Raises:
        UnrecoverableError: they do.
    """
    for _ in range(_LOOKED_AT):
        before = RngStates.capture()
        following = list(itertools.islice(items, 1))
        if following and moved(before, RngStates.capture()):
            raise UnrecoverableError(_DRAWS.format(type(dataset).__name__))
        if not following:
            return
        yield from following
    yield from items
