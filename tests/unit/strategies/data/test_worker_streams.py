"""Test that workers of a trainer's loaders end with the loader, and are found between two passes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from checkpointless.callbacks.trainer_parts import worker_iterators
from checkpointless.integrations.lightning.recoverable_strategy import _repeat_worker_draws

pytestmark = pytest.mark.lightning


class Trainer:
    """Represents a trainer in its first epoch."""

    training = True
    current_epoch = 0


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loader() -> DataLoader[Any]:
    return DataLoader([torch.zeros(2)] * 4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_collector")
def test_a_loader_whose_workers_are_seeded_is_freed_without_the_garbage_collector() -> None:
    """Collected as a part of a cycle, torch's iterator waits five seconds for each of its workers."""
    made, trainer = loader(), Trainer()
    _repeat_worker_draws(made, 1, trainer, 0)  # type: ignore[arg-type]
    is_freed = weakref.ref(made)
    del made
    assert is_freed() is None


def test_persistent_workers_are_found_between_two_passes() -> None:
    made = loader()
    combined = CombinedLoader(made, "sequential")
    assert worker_iterators(combined) == []
    list(combined)
    (iterator,) = worker_iterators(combined)
    assert len(iterator._workers) == 1
