"""Workers of a loader go on for the next one after a fault, if it would have made the same; else they end."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from checkpointless.inprocess.data_workers import kept_workers
from checkpointless.inprocess.data_workers.kept_workers import forget_workers, keep_workers, leave_workers
from checkpointless.inprocess.data_workers.streams import Place, seed_data_workers

Told = list[tuple[bool, str]]


class Draws(Dataset[torch.Tensor]):
    """Draws a number for each item, and says which process did."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(torch.rand(())), float(os.getpid())])


class Sampler:
    """Begins at a batch; a training can be told from its sampler."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self.first, 12):
            yield [2 * batch, 2 * batch + 1]

    def __len__(self) -> int:
        return 12 - self.first


def collate(items: list[Any]) -> Any:
    return default_collate(items)


def init(worker: int) -> None:
    pass


@pytest.fixture
def told() -> Iterator[Told]:
    """Yield what is told of workers; afterwards there are none."""
    yield []
    leave_workers(())
    for iterator in kept_workers._parked:
        kept_workers.end_workers(iterator)
    kept_workers._parked.clear()
    gc.collect()


@pytest.fixture
def make(told: Told) -> Callable[..., Any]:
    """Return a function for the loader of a training."""

    def tell(is_kept: bool, reason: str, seconds: float) -> None:
        told.append((is_kept, reason))

    def loader(data: Any, first: int = 0, *, epoch: int = 0, rank: int = 0, **settings: Any) -> Any:
        settings = {"num_workers": 2, "collate_fn": collate, "worker_init_fn": init, **settings}
        made: Any = DataLoader(data, batch_sampler=Sampler(first), **settings)  # type: ignore[arg-type]
        seed_data_workers(made, 7, rank=rank, place=lambda: Place(epoch, first))
        keep_workers(made, tell)
        return made

    return loader


def after_a_fault() -> None:
    leave_workers(())
    kept_workers._let_go()


def taken(iterator: Any, count: int) -> list[Any]:
    return [next(iterator) for _ in range(count)]


def pids(batches: list[Any]) -> set[int]:
    return {int(each) for batch in batches for each in batch[:, 2]}


def test_the_next_loader_goes_on_with_the_workers_and_has_the_same_batches(
    make: Callable[..., Any], told: Told
) -> None:
    data = Draws()
    iterator = iter(make(data))
    before = taken(iterator, 6)
    workers = [worker.pid for worker in iterator._workers]
    del iterator
    for first in (3, 5):
        after_a_fault()
        iterator = iter(make(data, first))
        again = taken(iterator, 4)
        assert [worker.pid for worker in iterator._workers] == workers
        assert pids(again) == set(workers)
        assert torch.equal(torch.cat(again[:1])[:, :2], before[first][:, :2]), "the same indices and draws"
        del iterator
    assert told == [(True, ""), (True, "")]
    expected = taken(iter(make(Draws(), 5)), 4)  # by new workers
    assert all(torch.equal(one[:, :2], other[:, :2]) for one, other in zip(again, expected))


def test_a_pass_that_went_on_ends_as_every_pass(make: Callable[..., Any], told: Told) -> None:
    data = Draws()
    taken(iter(make(data)), 2)
    after_a_fault()
    iterator = iter(make(data, 2))
    assert len(list(iterator)) == 10
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert len(list(iter(make(data)))) == 12
    assert told == [(True, "")], "there was nothing to go on with at the next pass"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": Draws()}, "another dataset"),
        ({"collate_fn": default_collate}, "another collate_fn"),
        ({"worker_init_fn": lambda worker: None}, "another worker_init_fn"),
        ({"worker_init_fn": None}, "another worker_init_fn"),
        ({"num_workers": 1}, "other settings of the loader"),
        ({"prefetch_factor": 3}, "other settings of the loader"),
        ({"epoch": 1}, "another pass or rank"),
        ({"rank": 1}, "another pass or rank"),
    ],
    ids=["dataset", "collate", "init", "no-init", "workers", "prefetch", "epoch", "rank"],
)
def test_another_loader_has_workers_of_its_own(
    make: Callable[..., Any], told: Told, change: dict[str, Any], reason: str
) -> None:
    data = Draws()
    iterator = iter(make(data))
    taken(iterator, 2)
    after_a_fault()
    arguments = {"data": data, **change}
    again = iter(make(arguments.pop("data"), 2, **arguments))
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert not pids(taken(again, 3)) & {worker.pid for worker in iterator._workers}
    assert told == [(False, reason)]


def test_what_was_left_in_the_middle_is_not_gone_on_with(
    make: Callable[..., Any], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Draws()
    iterator = iter(make(data))
    taken(iterator, 2)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(iterator, "_get_data", interrupted)
    iterator._task_info = {key: value[:1] for key, value in iterator._task_info.items()}
    with pytest.raises(KeyboardInterrupt):
        taken(iterator, 1)
    after_a_fault()
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert len(taken(iter(make(data, 2)), 3)) == 3
    assert told == []


def test_a_worker_that_has_died_or_does_not_answer_is_no_obstacle(
    make: Callable[..., Any], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_workers, "_ANSWER_S", 0.5)
    data = Draws()
    for kind in (signal.SIGKILL, signal.SIGSTOP):
        iterator = iter(make(data))
        taken(iterator, 2)
        after_a_fault()
        worker = iterator._workers[0]
        os.kill(worker.pid, kind)
        if kind == signal.SIGKILL:
            worker.join(10)
        again = iter(make(data, 2))
        assert len(taken(again, 3)) == 3
        assert not any(each.is_alive() for each in iterator._workers)
    assert told == [(False, "a worker does not answer")] * 2


def test_nothing_of_the_training_is_kept_alive(make: Callable[..., Any], told: Told) -> None:
    data = Draws()
    loader = make(data)
    iterator = iter(loader)
    taken(iterator, 2)
    sampler, dataset = weakref.ref(loader.batch_sampler), weakref.ref(data)
    del loader, iterator
    after_a_fault()
    del data
    gc.collect()
    assert sampler() is None
    assert dataset() is None
    taken(iter(make(Draws())), 1)
    assert told == [(False, "another dataset")]


def test_workers_end_with_the_training(make: Callable[..., Any]) -> None:
    iterator = iter(make(Draws()))
    taken(iterator, 2)
    workers = [psutil.Process(worker.pid) for worker in iterator._workers]
    del iterator
    assert all(worker.is_running() for worker in workers), "a trainer that is left drops its iterator at once"
    forget_workers()
    deadline_s = time.monotonic() + 20
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_loaders_of_other_kinds_are_left_alone(told: Told) -> None:
    others: list[DataLoader[Any]] = [
        DataLoader(Stream(), num_workers=1),
        DataLoader(Draws(), num_workers=1, persistent_workers=True),
        DataLoader(Draws()),
    ]
    for loader in others:
        seed_data_workers(loader, 7)
        keep_workers(loader, lambda *_: None)
        assert "_get_iterator" not in vars(loader)
    unseeded: DataLoader[Any] = DataLoader(Draws(), num_workers=1)
    keep_workers(unseeded, lambda *_: None)
    assert "_get_iterator" not in vars(unseeded)
    in_list: DataLoader[Any] = DataLoader([1, 2, 3], num_workers=1)  # type: ignore[arg-type]
    seed_data_workers(in_list, 7)
    keep_workers(in_list, lambda *_: None)
    assert [int(each) for each in in_list] == [1, 2, 3], "a list cannot be referred to weakly"
