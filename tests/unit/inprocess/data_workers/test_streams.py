"""Test what is decided about data-loader workers before one starts; ``tests/ranks`` tests what they draw."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from checkpointless.inprocess.worker_streams import _WorkerStreams, epochs_begun
from checkpointless.recovery import seed_data_workers


def ignore(worker_id: int) -> None:
    """Stand in for a user's ``worker_init_fn``."""


class OwnWorkers(DataLoader[int]):
    def _get_iterator(self) -> Any:
        return iter(())


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
