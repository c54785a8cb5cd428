"""Test where a training stands in its data; what samplers and datasets draw is drawn again after a fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.boundary.step_keeper import _without_worker_seeds
from checkpointless.integrations.lightning.data import loaders
from checkpointless.integrations.lightning.data.loaders import DataPosition, _repeat_order, _SamplerState, _track
from checkpointless.state import rng
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization import state_tree
from checkpointless.strategies.megatron_strategy import _PhasedIterator

pytestmark = pytest.mark.nemo


class Starts:
    """Keeps the streams of a pass as bytes, as a board does."""

    kept = b""

    def keep_data_start(self, streams: RngStates) -> None:
        self.kept = streams.to_bytes()

    def data_start(self) -> RngStates | None:
        return RngStates.from_bytes(self.kept) if self.kept else None


class Counting(IterableDataset):
    asked = 0

    def __iter__(self) -> Any:
        while True:
            self.asked += 1
            yield self.asked


def loop(loader: Any) -> Any:
    batches = MagicMock(_iterator=SimpleNamespace(_idx=0))
    batches.__next__.side_effect = iter(loader)
    return SimpleNamespace(
        _data_fetcher=SimpleNamespace(fetched=0, length=None, done=False, iterator=batches),
        _combined_loader=SimpleNamespace(flattened=[loader]),
        epoch_loop=SimpleNamespace(not_delivered=0),
    )


def test_a_dataset_that_alone_knows_its_batches_is_gone_through_again() -> None:
    dataset, training = Counting(), loaders.TrainingData()
    loader: Any = DataLoader(dataset, batch_size=None)
    training.made(loader, Starts(), None)
    fit_loop, position = loop(loader), DataPosition(5, 3, length=5)
    training.resume_at(position, fit_loop)
    assert dataset.asked == 3
    fetcher = fit_loop._data_fetcher
    assert (fetcher.fetched, fetcher.length, fetcher.done, fetcher.iterator._iterator._idx) == (5, 5, True, 3)
    assert training.position(fit_loop) == position


OF_ALL, PER_ITEM = 64, 8


def nemos_sampler() -> Any:
    from nemo.lightning.data import MegatronPretrainingRandomSampler

    sizes = {"total_samples": OF_ALL, "micro_batch_size": PER_ITEM // 4, "data_parallel_size": 4}
    return MegatronPretrainingRandomSampler(consumed_samples=0, data_parallel_rank=0, **sizes)


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
    first = loaders._TrackedSampler(nemos_sampler(), starts, None)
    lengths = set_up(first)
    assert lengths == (8, 6)
    position = DataPosition(4, 4, first.began_at, 48, length=6, length_at_start=first.length_at_start)
    again = loaders._TrackedSampler(nemos_sampler(), starts, position)
    assert set_up(again) == lengths
    assert again.consumed is not None
    assert len(again) == (OF_ALL - again.consumed) // PER_ITEM, "behind the set-up as ever"


def validating() -> DataLoader[Any]:
    return DataLoader(range(OF_ALL), batch_sampler=nemos_sampler())  # type: ignore[arg-type]


def test_a_validation_loader_that_is_made_late_has_its_length_and_goes_on() -> None:
    trainer = Mock()  # can be referred to weakly
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    first, late = validating(), validating()
    val_loop._combined_loader = SimpleNamespace(flattened=[first])
    before = loaders.ValidationData(trainer)
    assert len(list(first)) == 8
    state = before._take()
    assert state == {"0": 64}
    expected = list(first)

    val_loop._combined_loader = None
    after = loaders.ValidationData(trainer)
    after._put(state)
    assert after._take() == state, "nothing is lost by a fault before the loader is made"
    after.made(late)
    assert len(late) == 8
    val_loop._combined_loader = SimpleNamespace(flattened=[late])
    assert after._take() == state
    assert [batch.tolist() for batch in late] == [batch.tolist() for batch in expected]
    assert after._take() == {"0": 128}


# --- Passes over samplers of the user's ---------------------------------------------------------------------------

SAMPLES, BATCHES = 40, 8


class Own(Sampler[list[int]]):
    def __init__(self, how: str) -> None:
        self.how, self.passes, self.at_end, self.asked = how, 0, 0, 0
        self.numpys, self.pythons = numpy.random.default_rng(3), random.Random(7)
        self.torchs, self.philox = seeded(), numpy.random.Generator(numpy.random.Philox(6))

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


def drawn(how: str) -> DataLoader[Any]:
    """Uneven, the last batch asks for the end of the pass, at which the generator is drawn from once more."""
    samples, replaced = (SAMPLES - 2, False) if how == "uneven" else (SAMPLES, True)
    order = RandomSampler(range(samples), replaced, generator=seeded())
    return DataLoader(torch.arange(SAMPLES), batch_size=5, sampler=order)  # type: ignore[arg-type]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def had(batches: Iterator[Any], count: int) -> list[list[int]]:
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
    [*[(own, how) for how in HOW], (drawn, "replaced"), (drawn, "uneven")],
    ids=lambda make: f"{make[0].__name__}-{make[1]}",
)
def test_a_pass_goes_on_and_the_next_ones_follow(make: tuple[Any, str], within: int, ahead: int) -> None:
    """The loader is made anew, and the streams of the moment are put back; workers ask for items before that."""
    build, how = make
    random.seed(1), torch.manual_seed(1)
    starts, loader = Starts(), build(how)
    _track(loader, starts, None)
    first = iter(loader.batch_sampler)
    had(first, BATCHES)
    next(first, None)
    second = iter(loader.batch_sampler)
    had(second, 1)
    not_had = list(itertools.islice(second, ahead))
    not_had += had(second, max(0, min(within - 1, BATCHES - 1 - ahead)))
    asked = min(within + ahead, BATCHES)
    not_had = not_had[within - 1 :]
    moment, kept = RngStates.capture().to_bytes(), starts.kept
    expected = [*had(second, BATCHES - asked), *had(end_and_begin(second, loader), BATCHES)]

    random.seed(5), torch.manual_seed(5)
    again, starts_again = build(how), Starts()
    starts_again.kept = kept
    tracked = _track(again, starts_again, DataPosition(within, within))
    assert tracked is not None
    batches = iter(again.batch_sampler)
    if ahead:
        assert list(itertools.islice(batches, asked - within)) == not_had
    RngStates.from_bytes(moment).restore()
    found = [*had(batches, BATCHES - asked), *had(end_and_begin(batches, again), BATCHES)]
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
    inner = data.BatchSampler(map(lambda each: asked.append(each) or each, range(9)), 3, False)  # type: ignore[func-returns-value]
    loaders._keep_own_state(DataLoader(torch.arange(SAMPLES), batch_sampler=inner))  # type: ignore[arg-type]
    assert "loader" not in rng._sources


# --- Iterable datasets that are gone through once more ------------------------------------------------------------

ITEMS = 24


class Rows(IterableDataset[int]):
    """Gives numbers that are drawn, or counted, in one way."""

    def __init__(self, how: str) -> None:
        self.how, self.passes, self.own = how, 0, random.Random(3)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        rows = list(range(ITEMS))
        if self.how == "when torch asks":
            random.shuffle(rows)
            return iter(rows)
        return self.items(rows)

    def items(self, rows: list[int]) -> Iterator[int]:
        if self.how == "for the first item":
            random.shuffle(rows)
        for row in rows:
            if self.how == "by itself":
                row = self.own.randrange(ITEMS)
            elif self.how == "counts":
                row = (row * self.passes) % ITEMS
            yield row


def repeated(how: str, starts: Starts, position: DataPosition | None) -> DataLoader[int]:
    loader: DataLoader[int] = DataLoader(Rows(how), batch_size=None)
    loaders._repeat_items(loader, starts, position)
    return loader


def items_of(items: Iterator[int], count: int | None = None) -> list[int]:
    """Return as many items; the training draws between them."""
    found = []
    for item in itertools.islice(items, count):
        found.append(item)
        random.random(), torch.rand(2)
    return found


@pytest.mark.parametrize("within", [1, 2, 7])
@pytest.mark.parametrize("how", ["when torch asks", "for the first item", "by itself", "counts"])
def test_the_second_pass_is_gone_through_once_more(how: str, within: int) -> None:
    random.seed(1), torch.manual_seed(1)
    starts = Starts()
    loader = repeated(how, starts, None)
    assert len(items_of(iter(loader))) == ITEMS
    second = iter(loader)
    delivered = items_of(second, within)
    kept, moment = starts.kept, RngStates.capture().to_bytes()
    expected = [items_of(second), items_of(iter(loader))]

    random.seed(2), torch.manual_seed(2)
    starts_again = Starts()
    starts_again.kept = kept
    again = repeated(how, starts_again, DataPosition(within, within))
    items = iter(again)
    assert list(itertools.islice(items, within)) == delivered
    RngStates.from_bytes(moment).restore()
    assert [items_of(items), items_of(iter(again))] == expected


def test_a_data_step_may_take_the_next_batch_after_one_that_cannot_be_read() -> None:
    batches = map(int, ["0", "damaged", "2"])
    call: Any = SimpleNamespace(steps=SimpleNamespace(making=1), enter_phase=lambda *_: None)
    phased = _PhasedIterator(batches, call)
    assert next(phased) == 0
    with pytest.raises(ValueError, match="damaged"):
        next(phased)
    assert list(phased) == [2]


# --- An order which a sampler draws, where the loader knows its position alone ------------------------------------

ORDERED = 32


def weighted(generator: torch.Generator | None = None) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * ORDERED, ORDERED, generator=generator)


def divided(sampler: Any) -> DistributedSamplerWrapper:
    return DistributedSamplerWrapper(sampler, num_replicas=2, rank=1, shuffle=False)


def loader_of(sampler: Any) -> Any:
    return DataLoader(torch.arange(ORDERED), batch_size=4, sampler=sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [divided, lambda sampler: sampler], ids=["divided", "whole"])
def test_the_interrupted_pass_is_drawn_again_and_the_next_one_anew(wrap: Any) -> None:
    """The generator is made anew with its seed, as a script that is entered again does."""
    starts = Starts()
    loader = loader_of(wrap(weighted(seeded())))
    assert _repeat_order(loader, starts, None) is not None
    first, second, third = (list(loader.batch_sampler) for _ in range(3))
    assert first != second != third
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
    order = loaders._DrawnOrder(weighted(), starts, None)
    interrupted = list(order)
    torch.manual_seed(2)
    late = loaders._DrawnOrder(weighted(), starts, DataPosition(3, 3))
    late.resumed()
    before = torch.get_rng_state()
    assert list(late) == interrupted
    assert torch.equal(torch.get_rng_state(), before), "the training's streams stand where they stood"
    assert list(late) != interrupted
    over = loaders._DrawnOrder(weighted(), starts, DataPosition(8, 8))
    over.begin_anew()
    assert list(over) != interrupted


DISTRIBUTED: Any = data.DistributedSampler(range(ORDERED), num_replicas=2, rank=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampler", [data.SequentialSampler(range(ORDERED)), DISTRIBUTED], ids=["sequential", "distributed"]
)
def test_an_order_that_follows_from_seed_and_epoch_needs_nothing(sampler: Any) -> None:
    loader = loader_of(sampler)
    assert _repeat_order(loader, Starts(), None) is None
    assert loader.sampler is sampler


@dataclass
class Endless(Sampler[int]):
    draws_each: bool = False

    def __iter__(self) -> Iterator[int]:
        first = int(torch.randint(ORDERED, ()))
        yield first
        for number in itertools.count(first + 1):
            yield int(torch.randint(ORDERED, ())) if self.draws_each else number % ORDERED


def test_an_endless_order_is_drawn_again_item_by_item() -> None:
    starts = Starts()
    loader, entered = loader_of(Endless()), loader_of(Endless())
    assert _repeat_order(loader, starts, None) is not None
    begun = list(itertools.islice(loader.batch_sampler, 3))
    torch.rand(7)
    assert _repeat_order(entered, starts, DataPosition(3, 3)) is not None
    stand = torch.get_rng_state()
    assert list(itertools.islice(entered.batch_sampler, 3)) == begun
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
    states = [torchdatas_state(seed, torch.arange(ORDERED), 2) for seed in (1, 2)]
    assert states[0] != states[1]
    first, second = ([_without_worker_seeds([state])] for state in states)
    assert first == second
    further = torchdatas_state(1, torch.arange(ORDERED), 3)
    assert _without_worker_seeds(further) != _without_worker_seeds(states[0])
    assert "_base_seed" in str(states[0])  # what is loaded is whole


@pytest.mark.parametrize("state", [{}, {"given": 3}, [{"_snapshot": {}}], [{"_snapshot": None}], 5])
def test_the_states_of_other_loaders_stay_as_they_are(state: Any) -> None:
    assert _without_worker_seeds(state) == state


# --- What samplers keep for themselves ----------------------------------------------------------------------------


class Keeps(Sampler[int]):
    def __init__(self, **kept: Any) -> None:
        vars(self).update(kept)

    def __iter__(self) -> Any:
        return iter(())


class Other(Keeps):
    """A sampler of another class."""


def kept_by(*owners: object) -> dict[str, Any]:
    """Return what is kept, as another process gets it."""
    state: dict[str, Any] = state_tree.loads(state_tree.dumps(_SamplerState([None, *owners]).take()))
    return state


def test_numbers_of_a_users_sampler() -> None:
    state = kept_by(Keeps(epoch=4, ratio=0.5, name="a"))
    fresh: Any = Keeps(epoch=0, ratio=1.0, name="b")
    _SamplerState([None, fresh]).put(state)
    assert vars(fresh) == {"epoch": 4, "ratio": 0.5, "name": "b"}
    other: Any = Other(epoch=0)
    _SamplerState([None, other]).put(state)
    assert other.epoch == 0, "it is of another class"


def test_generators_alone_are_kept_of_a_librarys_sampler() -> None:
    assert not kept_by(RandomSampler([1]))
    assert list(kept_by(RandomSampler([1], generator=torch.Generator()))) == ["1:RandomSampler|generator"]
