"""Test where a training stands in its data, by what Lightning's fetcher counts and a tracked sampler knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from checkpointless.integrations.lightning.data.loaders import (
    DataPosition,
    TrainingData,
    ValidationData,
    _TrackedSampler,
)
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


# --- Lengths that samplers tell Lightning when batches are fetched ahead, and where validations go on -------------


SAMPLES, PER_ITEM = 64, 8


class Trainer:
    """Stands in for a trainer, and can be referred to weakly."""


def sampler_at(consumed: int = 0) -> Any:
    from nemo.lightning.data import MegatronPretrainingRandomSampler

    return MegatronPretrainingRandomSampler(
        total_samples=SAMPLES,
        consumed_samples=consumed,
        micro_batch_size=PER_ITEM // 4,
        data_parallel_rank=0,
        data_parallel_size=4,
    )


def set_up(tracked: Any) -> tuple[int, int]:
    """Return the lengths that Lightning asks for at set-up: without an iterator, and with two fetched ahead."""
    before = len(tracked)
    items = iter(tracked)
    next(items), next(items)
    found = before, len(tracked)
    tracked.set_up()
    return found


def test_the_lengths_at_set_up_are_the_same_after_a_fault() -> None:
    """With fewer Lightning would refuse a validation interval that the epoch had batches enough for."""
    starts = SimpleNamespace(keep_data_start=lambda streams: None, data_start=lambda: None)
    first = _TrackedSampler(sampler_at(), starts, None)
    lengths = set_up(first)
    assert lengths == (8, 6)
    position = DataPosition(4, 4, first.began_at, 48, length=6, length_at_start=first.length_at_start)
    again = _TrackedSampler(sampler_at(), starts, position)
    assert set_up(again) == lengths
    assert again.consumed is not None
    assert len(again) == (SAMPLES - again.consumed) // PER_ITEM, "behind the set-up as ever"


def test_a_validation_loader_that_is_made_late_has_its_length_and_goes_on() -> None:
    val_loop = SimpleNamespace(_combined_loader=None)
    trainer: Any = Trainer()
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=val_loop))

    def loader() -> DataLoader[int]:
        return DataLoader(range(SAMPLES), batch_sampler=sampler_at())  # type: ignore[arg-type]

    def put_in_place(made: DataLoader[int]) -> None:
        val_loop._combined_loader = SimpleNamespace(flattened=[made])

    before = ValidationData(trainer)
    put_in_place(loader())
    (first,) = val_loop._combined_loader.flattened
    assert len(list(first)) == 8
    state = before._take()
    assert state == {"0": 64}
    expected = list(first)

    val_loop._combined_loader = None
    after = ValidationData(trainer)
    after._put(state)
    assert after._take() == state, "nothing is lost by a fault before the loader is made"
    late = loader()
    after.made(late)
    assert len(late) == 8
    put_in_place(late)
    assert after._take() == state
    assert [batch.tolist() for batch in late] == [batch.tolist() for batch in expected]
    assert after._take() == {"0": 128}
