"""Test that an order which a sampler draws is drawn again, where the loader knows its position alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.boundary.step_keeper import _without_worker_seeds
from checkpointless.integrations.lightning.data.loaders import (
    DataPosition,
    _DrawnOrder,
    _repeat_order,
)
from checkpointless.state.rng import RngStates
from tests.unit.strategies.data.starts import Starts

pytestmark = pytest.mark.nemo

SAMPLES = 32


def weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, generator=generator)


def divided(sampler: Any) -> DistributedSamplerWrapper:
    return DistributedSamplerWrapper(sampler, num_replicas=2, rank=1, shuffle=False)


def loader_of(sampler: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(SAMPLES), batch_size=4, sampler=sampler)  # type: ignore[arg-type]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("wrap", [divided, lambda sampler: sampler], ids=["divided", "whole"])
def test_the_interrupted_pass_is_drawn_again_and_the_next_one_anew(wrap: Any) -> None:
    """The generator is made anew with its seed, as a script that is entered again does."""
    starts = Starts()
    loader = loader_of(wrap(weighted(seeded())))
    assert _repeat_order(loader, starts, None) is not None
    batches: Any = loader.batch_sampler
    first, second, third = (list(batches) for _ in range(3))
    assert first != second != third
    loader = loader_of(wrap(weighted(seeded())))
    list(loader.batch_sampler), list(loader.batch_sampler)  # type: ignore[arg-type]
    kept = starts.kept  # the third pass

    own = seeded()
    entered = loader_of(wrap(weighted(own)))
    order = _repeat_order(entered, starts, DataPosition(3, 3))
    assert order is not None
    batches = entered.batch_sampler
    assert list(batches) == list(batches) == third, "however often the loader begins it"
    assert starts.kept is kept
    RngStates.from_bytes(kept).restore()
    list(weighted(own))  # what is put back last: the streams behind the third pass
    order.resumed()
    assert list(batches) not in (first, second, third)


def test_a_loader_that_begins_late_repeats_once_and_not_if_its_pass_was_over() -> None:
    starts = Starts()
    torch.manual_seed(1)
    order = _DrawnOrder(weighted(), starts, None)
    interrupted = list(order)
    torch.manual_seed(2)
    late = _DrawnOrder(weighted(), starts, DataPosition(3, 3))
    late.resumed()
    before = torch.get_rng_state()
    assert list(late) == interrupted
    assert torch.equal(torch.get_rng_state(), before), "the training's streams stand where they stood"
    assert list(late) != interrupted
    over = _DrawnOrder(weighted(), starts, DataPosition(8, 8))
    over.begin_anew()
    assert list(over) != interrupted


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(SAMPLES)),
        DistributedSampler(range(SAMPLES), num_replicas=2, rank=0),  # type: ignore[arg-type]
    ],
    ids=["sequential", "distributed"],
)
def test_an_order_that_follows_from_seed_and_epoch_needs_nothing(sampler: Any) -> None:
    loader = loader_of(sampler)
    assert _repeat_order(loader, Starts(), None) is None
    assert loader.sampler is sampler


class Endless(torch.utils.data.Sampler[int]):
    """Has no length, and never ends."""

    def __init__(self, draws_each: bool = False) -> None:
        self.draws_each = draws_each

    def __iter__(self) -> Iterator[int]:
        first = int(torch.randint(SAMPLES, ()))
        yield first
        for number in itertools.count(first + 1):
            yield int(torch.randint(SAMPLES, ())) if self.draws_each else number % SAMPLES


def test_an_endless_order_is_drawn_again_item_by_item() -> None:
    starts = Starts()
    loader = loader_of(Endless())
    assert _repeat_order(loader, starts, None) is not None
    begun: Any = list(itertools.islice(loader.batch_sampler, 3))  # type: ignore[arg-type]
    torch.rand(7)
    entered = loader_of(Endless())
    assert _repeat_order(entered, starts, DataPosition(3, 3)) is not None
    stand = torch.get_rng_state()
    assert list(itertools.islice(entered.batch_sampler, 3)) == begun  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), stand)


def test_an_endless_order_that_draws_each_item_is_refused() -> None:
    loader = loader_of(Endless(draws_each=True))
    assert _repeat_order(loader, Starts(), None) is not None
    with pytest.raises(UnrecoverableError, match="Endless draws random numbers of the training"):
        next(iter(loader))


def torchdatas_state(seed: int, dataset: Any, batches: int) -> dict[str, Any]:
    """Return the state of a loader with a worker, in a process that was seeded with ``seed``."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(seed)
    loader = stateful.StatefulDataLoader(dataset, batch_size=4, num_workers=1)
    list(itertools.islice(loader, batches))
    state: dict[str, Any] = loader.state_dict()
    return state


def test_what_workers_are_seeded_with_is_not_compared_between_ranks() -> None:
    """Of no rank of a job that nobody seeds could the loader's state be replaced by a peer's otherwise."""
    states = [torchdatas_state(seed, torch.arange(SAMPLES), 2) for seed in (1, 2)]
    assert states[0] != states[1]
    first, second = ([_without_worker_seeds([state])] for state in states)
    assert first == second
    further = torchdatas_state(1, torch.arange(SAMPLES), 3)
    assert _without_worker_seeds(further) != _without_worker_seeds(states[0])
    assert "_base_seed" in str(states[0])  # what is loaded is whole


@pytest.mark.parametrize("state", [{}, {"given": 3}, [{"_snapshot": {}}], [{"_snapshot": None}], 5])
def test_the_states_of_other_loaders_stay_as_they_are(state: Any) -> None:
    assert _without_worker_seeds(state) == state
