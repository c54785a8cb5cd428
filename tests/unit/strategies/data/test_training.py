"""Test where a training stands in its data, by what Lightning's fetcher counts and a tracked sampler knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from checkpointless.integrations.lightning.data.loaders import DataPosition, TrainingData
from tests.unit.strategies.data.starts import Starts

pytestmark = pytest.mark.nemo


class Counting(IterableDataset):
    """Counts what was asked of it."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Any:
        while True:
            self.asked += 1
            yield self.asked


def loop(loader: Any, fetched: int, not_delivered: int) -> Any:
    fetcher = SimpleNamespace(fetched=fetched, length=None, done=False, iterator=Batches(iter(loader)))
    return SimpleNamespace(
        _data_fetcher=fetcher,
        _combined_loader=SimpleNamespace(flattened=[loader]),
        epoch_loop=SimpleNamespace(not_delivered=not_delivered),
    )


class Batches:
    """Stands in for Lightning's iterator over a combined loader."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._iterator: Any = SimpleNamespace(_idx=0)

    def __next__(self) -> Any:
        return next(self._batches)


def test_before_anything_is_fetched_it_stands_at_the_beginning() -> None:
    fit_loop: Any = SimpleNamespace(_data_fetcher=None, epoch_loop=SimpleNamespace(not_delivered=0))
    assert TrainingData().position(fit_loop) == DataPosition(0, 0)


def test_batches_of_an_earlier_process_count_as_fetched_and_not_as_delivered() -> None:
    position = TrainingData().position(loop(range(9), fetched=7, not_delivered=4))
    assert (position.fetched, position.delivered, position.consumed) == (7, 3, None)


def test_a_dataset_that_alone_knows_its_batches_is_gone_through_again() -> None:
    dataset, data = Counting(), TrainingData()
    loader: Any = DataLoader(dataset, batch_size=None)
    data.made(loader, Starts(), None)
    fit_loop = loop(loader, fetched=0, not_delivered=0)
    data.resume_at(DataPosition(5, 3, length=5), fit_loop)
    assert dataset.asked == 3
    fetcher = fit_loop._data_fetcher
    assert (fetcher.fetched, fetcher.length, fetcher.done, fetcher.iterator._iterator._idx) == (5, 5, True, 3)
    assert data.position(fit_loop) == DataPosition(5, 3, length=5)


def test_a_sampler_that_is_tracked_begins_behind_what_was_delivered() -> None:
    data = TrainingData()
    numbers: Any = list(range(8))
    loader: Any = DataLoader(numbers, batch_size=2)
    data.made(loader, Starts(), DataPosition(3, 3))
    fit_loop = loop(loader, fetched=0, not_delivered=0)
    data.resume_at(DataPosition(3, 3), fit_loop)
    assert next(fit_loop._data_fetcher.iterator).tolist() == [6, 7]
    assert data.position(fit_loop).delivered == 3
