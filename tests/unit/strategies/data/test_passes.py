"""Test passes over samplers of the user's: what they draw is drawn again after a fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from checkpointless.integrations.lightning.data.loaders import DataPosition, _keep_own_state, _track
from checkpointless.state import rng
from checkpointless.state.rng import RngStates
from tests.unit.strategies.data.starts import Starts

pytestmark = pytest.mark.nemo

SAMPLES, BATCHES = 40, 8


class Own(Sampler[list[int]]):
    """Batches of the user's."""

    def __init__(self, how: str) -> None:
        self.how, self.passes, self.at_end, self.asked = how, 0, 0, 0
        self.numpys, self.pythons = numpy.random.default_rng(3), random.Random(7)
        self.torchs, self.philox = torch.Generator().manual_seed(5), numpy.random.Generator(numpy.random.Philox(6))

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        pool = list(range(SAMPLES))
        for number in range(BATCHES):
            self.asked += 1
            yield [
                self.draw(number) if self.how != "pool" else pool.pop(random.randrange(len(pool))) for _ in "abc"
            ]
        self.at_end += 1

    def draw(self, number: int) -> int:
        draws: dict[str, Callable[[], int]] = {
            "global": lambda: random.randrange(SAMPLES),
            "global-torch": lambda: int(torch.randint(SAMPLES, ())),
            "python": lambda: self.pythons.randrange(SAMPLES),
            "numpy": lambda: int(self.numpys.integers(SAMPLES)),
            "philox": lambda: int(self.philox.integers(SAMPLES)),
            "torch": lambda: int(torch.randint(SAMPLES, (), generator=self.torchs)),
            "counts": lambda: (self.passes * 7 + self.at_end * 11 + self.asked * 13 + number) % SAMPLES,
        }
        return draws[self.how]()

    def __len__(self) -> int:
        return BATCHES


HOW = ("pool", "global", "global-torch", "python", "numpy", "philox", "torch", "counts")


def own(how: str) -> DataLoader[Any]:
    return DataLoader(torch.arange(SAMPLES), batch_sampler=Own(how))  # type: ignore[arg-type]


def replaced(_: str) -> DataLoader[Any]:
    drawn = RandomSampler(range(SAMPLES), replacement=True, generator=torch.Generator().manual_seed(3))
    return DataLoader(torch.arange(SAMPLES), batch_size=5, sampler=drawn)  # type: ignore[arg-type]


def uneven(_: str) -> DataLoader[Any]:
    """The last batch asks for the end of the pass, at which the generator is drawn from once more."""
    drawn = RandomSampler(range(SAMPLES - 2), generator=torch.Generator().manual_seed(3))
    return DataLoader(torch.arange(SAMPLES), batch_size=5, sampler=drawn)  # type: ignore[arg-type]


def trained(batches: Iterator[Any], count: int) -> list[list[int]]:
    """Return as many batches; the training draws between them."""
    found = []
    for _ in range(count):
        found.append(list(next(batches)))
        random.random(), torch.rand(3)
    return found


@pytest.mark.parametrize("ahead", [0, 2], ids=["", "ahead"])
@pytest.mark.parametrize("within", [1, 2, 3, BATCHES - 1, BATCHES])
@pytest.mark.parametrize(
    "make",
    [*[(own, how) for how in HOW], (replaced, ""), (uneven, "")],
    ids=lambda make: f"{make[0].__name__}-{make[1]}",
)
def test_a_pass_goes_on_and_the_next_ones_follow(make: tuple[Any, str], within: int, ahead: int) -> None:
    """The loader is made anew, and the streams of the moment are put back; workers ask for items before that."""
    build, how = make
    random.seed(1), torch.manual_seed(1)
    starts, loader = Starts(), build(how)
    _track(loader, starts, None)
    first = iter(loader.batch_sampler)
    trained(first, BATCHES)
    next(first, None)
    second = iter(loader.batch_sampler)
    trained(second, 1)
    not_had = list(itertools.islice(second, ahead))
    not_had += trained(second, max(0, min(within - 1, BATCHES - 1 - ahead)))
    asked = min(within + ahead, BATCHES)
    not_had = not_had[within - 1 :]
    moment, kept = RngStates.capture().to_bytes(), starts.kept
    expected = [*trained(second, BATCHES - asked), *trained(end_and_begin(second, loader), BATCHES)]

    random.seed(5), torch.manual_seed(5)
    again, starts_again = build(how), Starts()
    starts_again.kept = kept
    tracked = _track(again, starts_again, DataPosition(within, within))
    assert tracked is not None
    batches = iter(again.batch_sampler)
    if ahead:
        assert list(itertools.islice(batches, asked - within)) == not_had
    RngStates.from_bytes(moment).restore()
    found = [*trained(batches, BATCHES - asked), *trained(end_and_begin(batches, again), BATCHES)]
    assert found == expected


def end_and_begin(batches: Iterator[Any], loader: Any) -> Iterator[Any]:
    """End a pass, and begin the next one."""
    assert next(batches, None) is None
    return iter(loader.batch_sampler)


def test_a_sampler_of_the_users_is_asked_for_one_item_ahead_and_once() -> None:
    sampler = Own("counts")
    loader: Any = DataLoader(torch.arange(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]
    _track(loader, Starts(), None)
    batches = iter(loader.batch_sampler)
    asked = [(next(batches), sampler.asked)[1] for _ in range(4)]
    assert asked == [2, 2, 3, 4]


def test_nothing_of_torchs_samplers_is_asked_for_ahead_or_kept() -> None:
    loader: Any = DataLoader(torch.arange(SAMPLES), batch_size=5, shuffle=True)  # type: ignore[arg-type]
    _track(loader, Starts(), None)
    assert "loader" not in rng._sources
    asked: list[int] = []
    inner = BatchSampler(map(lambda each: asked.append(each) or each, range(9)), 3, False)  # type: ignore[func-returns-value]
    _keep_own_state(DataLoader(torch.arange(SAMPLES), batch_sampler=inner))  # type: ignore[arg-type]
    assert "loader" not in rng._sources
