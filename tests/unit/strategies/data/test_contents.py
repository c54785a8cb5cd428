"""Test that orders which follow from what a sampler keeps in its containers are refused, and no others."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery import rng
from checkpointless.recovery.rng import RngStates
from checkpointless.strategies.data import position as position_module
from checkpointless.strategies.data.iterables import repeat_items
from checkpointless.strategies.data.position import TrackedSampler, keep_own_state
from checkpointless.strategies.data.stateful import DrawnOrder

pytestmark = pytest.mark.nemo

SAMPLES = 100


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_sources", {})
    monkeypatch.setattr(position_module, "_kept", [])


class Starts:
    """Keeps nothing."""

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep nothing."""

    def data_start(self) -> RngStates | None:
        """Know nothing."""


class Keeps(Sampler[int]):
    """Orders what it keeps in one way."""

    def __init__(self, order: Callable[[Any], list[int]], kept: Any) -> None:
        self.order, self.kept, self.epoch = order, kept, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.order(self))

    def __len__(self) -> int:
        return SAMPLES


def in_place(sampler: Any) -> list[int]:
    random.shuffle(sampler.kept)
    return list(map(int, sampler.kept))


def of_the_last(sampler: Any) -> list[int]:
    sampler.kept = random.sample(sampler.kept, SAMPLES)
    return list(sampler.kept)


def in_an_array(sampler: Any) -> list[int]:
    numpy.random.shuffle(sampler.kept)
    return sampler.kept.tolist()  # type: ignore[no-any-return]


def in_a_tensor(sampler: Any) -> list[int]:
    sampler.kept.copy_(sampler.kept[torch.randperm(SAMPLES)])
    return sampler.kept.tolist()  # type: ignore[no-any-return]


def in_a_dict(sampler: Any) -> list[int]:
    random.shuffle(sampler.kept["rows"])
    return list(sampler.kept["rows"])


def anew(sampler: Any) -> list[int]:
    sampler.kept = random.Random(sampler.epoch).sample(range(SAMPLES), SAMPLES)
    return list(sampler.kept)


def with_a_memory(sampler: Any) -> list[int]:
    order = random.sample(range(SAMPLES), SAMPLES)
    sampler.kept.append([sampler.epoch, *order])
    return order


NUMBERS = list(range(SAMPLES))
NEEDED = [
    (in_place, NUMBERS),
    (in_place, deque(NUMBERS)),
    (of_the_last, NUMBERS),
    (in_an_array, numpy.arange(SAMPLES)),
    (in_a_tensor, torch.arange(SAMPLES)),
    (in_a_dict, {"rows": NUMBERS}),
]


@pytest.mark.parametrize("wrap", [TrackedSampler, DrawnOrder])
@pytest.mark.parametrize(("order", "kept"), NEEDED)
def test_an_order_that_comes_from_the_last_one_is_refused(wrap: Any, order: Any, kept: Any) -> None:
    sampler = Keeps(order, copy.deepcopy(kept))
    keep_own_state(DataLoader(range(SAMPLES), sampler=sampler))  # type: ignore[arg-type]
    tracked = wrap(sampler, Starts(), None)
    assert sorted(tracked) == NUMBERS
    with pytest.raises(UnrecoverableError, match="Keeps keeps in kept what the order of its next pass comes from"):
        list(tracked)


@pytest.mark.parametrize("wrap", [TrackedSampler, DrawnOrder])
@pytest.mark.parametrize("order", [anew, with_a_memory])
def test_contents_that_no_order_needs_may_change(wrap: Any, order: Any) -> None:
    """The passes are those of a sampler that nobody looks at."""
    calm, sampler = Keeps(order, [[0]] * SAMPLES), Keeps(order, [[0]] * SAMPLES)
    random.seed(4)
    expected = [list(calm) for _ in range(5)]
    keep_own_state(DataLoader(range(SAMPLES), sampler=sampler))  # type: ignore[arg-type]
    tracked = wrap(sampler, Starts(), None)
    random.seed(4)
    assert [list(tracked) for _ in range(5)] == expected
    assert sampler.kept == calm.kept
    assert sampler.epoch == calm.epoch


class Files(IterableDataset[int]):
    """Shuffles its files in place."""

    def __init__(self) -> None:
        self.files = list(NUMBERS)

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.files)
        return iter(self.files)


def test_a_dataset_that_shuffles_its_files_in_place_is_refused() -> None:
    loader: DataLoader[int] = DataLoader(Files(), batch_size=None)
    repeat_items(loader, Starts(), None)
    assert sorted(loader) == NUMBERS
    with pytest.raises(UnrecoverableError, match="Files keeps in files what the order of its next pass comes from"):
        list(loader)
