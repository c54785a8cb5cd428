"""Test what is decided about data-loader workers before one starts; ``tests/ranks`` tests what they draw."""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from checkpointless.inprocess.worker_streams import _WorkerStreams, epochs_begun, is_iterable
from checkpointless.recovery import Place, seed_data_workers


def ignore(worker_id: int) -> None:
    """Stand in for a user's ``worker_init_fn``."""


def later() -> Place:
    return Place(3, 7)


class Lines(IterableDataset[int]):
    """Can be iterated over, but has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


class OwnWorkers(DataLoader[int]):
    """Represents a loader that does not start torch's workers."""

    def _get_iterator(self) -> Any:
        return iter(())


def test_a_loader_without_workers_is_left_as_it_is() -> None:
    loader: DataLoader[int] = DataLoader(range(4), worker_init_fn=ignore)  # type: ignore[arg-type]
    before = dict(vars(loader))
    seed_data_workers(loader, 1)
    assert vars(loader) == before


def test_the_loaders_own_init_is_kept_and_nothing_is_stacked() -> None:
    loader: DataLoader[int] = DataLoader(range(4), num_workers=1, worker_init_fn=ignore)  # type: ignore[arg-type]
    for seed in (1, 2):
        seed_data_workers(loader, seed)
    assert isinstance(loader.worker_init_fn, _WorkerStreams)
    assert loader.worker_init_fn.key[0] == 2
    assert loader.worker_init_fn.init is ignore


@pytest.mark.parametrize("loader", [OwnWorkers(range(4), num_workers=1), [1, 2]], ids=["subclass", "list"])  # type: ignore[arg-type]
def test_a_loader_whose_workers_are_its_own_is_refused_by_name(loader: Any) -> None:
    with pytest.raises(TypeError, match=type(loader).__name__):
        seed_data_workers(loader, 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_are_those_of_the_samplers(workers: int) -> None:
    before = epochs_begun()
    sampler: DistributedSampler[int] = DistributedSampler(range(4), 2, 0)  # type: ignore[arg-type]
    loader: DataLoader[int] = DataLoader(range(4), sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    seed_data_workers(loader, 1)
    sampler.set_epoch(2)
    assert epochs_begun() == before + 2
    del sampler, loader
    gc.collect()
    assert epochs_begun() == before


def test_only_a_worker_has_its_streams_set() -> None:
    called: list[int] = []
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    _WorkerStreams((1, 0, ""), Place, called.append)(5)
    assert called == [5]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state()[1].tolist() == numpy_state[1].tolist()  # type: ignore[index, union-attr]
    assert random.getstate() == python_state


def test_what_is_sent_to_a_spawned_worker_knows_the_place_and_nothing_else() -> None:
    streams = _WorkerStreams((1, 2, "training"), lambda: later(), ignore)  # a lambda cannot be pickled
    copied = pickle.loads(pickle.dumps(streams))
    assert copied.place() == Place(3, 7)
    assert (copied.key, copied.init) == (streams.key, ignore)


def test_a_dataset_without_indices_is_told_apart() -> None:
    assert is_iterable(DataLoader(Lines()))
    assert not is_iterable(DataLoader(range(4)))  # type: ignore[arg-type]
