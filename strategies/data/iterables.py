"""Iterable datasets that do not know where they stand, and are gone through once more after a fault.

What such a dataset draws from the streams of the training process before its first item is drawn again. Later items
have to come from elsewhere, because the training draws from these streams in between.
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
from checkpointless.strategies.data.passes import moved, without_own
from checkpointless.strategies.data.position import DataPosition, Starts, keep_own_state

_DRAWS = (
    "the dataset {} draws random numbers in the training process while it is gone through, so that it would give "
    "other items after a fault: let a worker draw them (num_workers=1), draw from a generator that the dataset has "
    "for itself, or give it state_dict and load_state_dict"
)


def repeat_items(loader: Iterable[object], starts: Starts, position: DataPosition | None) -> None:
    """Have the iterable dataset of ``loader`` give the same items when it is gone through once more after a fault.

    Nothing is done if data-loader workers go through it, whose streams follow from the number of the batch, or if
    it or its loader keeps its position.

    Args:
        loader: a training loader.
        starts: keeps the random streams at the beginning of each pass.
        position: where the training stands; None: at the beginning.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return
    if loader.num_workers > 0 or isinstance(loader, _Stateful) or isinstance(loader.dataset, _Stateful):
        return
    keep_own_state(loader)
    repeats = iter([position is not None and position.within and position.delivered > 0])  # the first pass alone
    begin = functools.partial(_pass, loader.dataset, starts, repeats)
    loader._get_iterator = functools.partial(_begin, loader._get_iterator, loader, begin)  # type: ignore[method-assign]


def _begin(make: Callable[[], Any], loader: Any, begin: Callable[[Iterable[Any]], Iterator[Any]]) -> Any:
    """Make a loader's iterator that begins a pass when its first item is asked for."""
    dataset = loader.dataset
    if isinstance(dataset, IterDataPipe):  # torch does more with these
        iterator = make()
        iterator._dataset_fetcher.dataset_iter = begin(iterator._dataset_fetcher.dataset_iter)
        return iterator
    object.__setattr__(loader, "dataset", _Late(begin(dataset)))  # torch forbids a plain assignment
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


def _pass(owner: object, starts: Starts, repeats: Iterator[bool], dataset: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a pass, which begins when the first is asked for.

    Args:
        owner: the dataset.
        starts: keeps the random streams at the beginning of each pass.
        repeats: says of the next pass whether it was begun before a fault.
        dataset: the dataset, or an iterator over it that has drawn nothing yet.

    Raises:
        UnrecoverableError: the dataset draws random numbers for its second item.
    """
    now = RngStates.capture()
    is_again = next(repeats, False)
    start = starts.data_start() if is_again else None
    if not is_again:
        starts.keep_data_start(now)
    elif start is not None:
        start.restore()
    items = iter(dataset)
    first = list(itertools.islice(items, 1))
    if start is not None:
        without_own(now).restore()
    yield from first
    before = RngStates.capture()
    second = list(itertools.islice(items, 1))
    if second and moved(before, RngStates.capture()):
        raise UnrecoverableError(_DRAWS.format(type(owner).__name__))
    yield from itertools.chain(second, items)
