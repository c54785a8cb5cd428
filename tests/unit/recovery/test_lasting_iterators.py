"""Test which iterators are refused because a fault would begin them anew."""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.training.lasting_iterators import LastingIterators, _follows_steps, _iterators_in
from checkpointless.recovery.training.loop import LoopTraining

DATA = torch.arange(32.0)


def by_index() -> Iterator[torch.Tensor]:
    at = 0
    while True:
        yield DATA[at : at + 2]
        at += 2


def by_index_of_a_function() -> Iterator[torch.Tensor]:
    at = 0

    def batches() -> Iterator[torch.Tensor]:
        nonlocal at
        while True:
            at += 2
            yield DATA[at : at + 2]

    return batches()


def over_epochs() -> Iterator[torch.Tensor]:
    for _ in range(4):
        yield from DATA.split(2)


def of_own_stream(stream: Any, draw: Callable[[Any], int]) -> Iterator[torch.Tensor]:
    while True:
        yield DATA[draw(stream) :][:1]


def of_torchs_stream() -> Iterator[torch.Tensor]:
    while True:
        batch = torch.randn(2)
        yield batch


class Stream:
    """Iterates as classes of users do, by a count of its own."""

    def __init__(self) -> None:
        self.step = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> torch.Tensor:
        self.step += 1
        return DATA[self.step :][:2]


def drawn(stream: torch.Generator) -> int:
    return int(torch.randint(8, (), generator=stream))


MOVES: dict[str, Callable[[], Iterator[Any]]] = {
    "by-index": by_index,
    "by-index-of-a-function": by_index_of_a_function,
    "over-epochs": over_epochs,
    "list": lambda: iter(DATA.split(2)),
    "cycle": lambda: itertools.cycle(DATA.split(2)),
    "zip": lambda: zip(DATA.split(2), DATA.split(2)),
    "enumerate": lambda: iter(enumerate(DATA.split(2))),
    "map": lambda: map(torch.neg, DATA.split(2)),
    "islice": lambda: itertools.islice(by_index(), 2, None),
    "class": Stream,
    "loader": lambda: iter(DataLoader(DATA, batch_size=2)),  # type: ignore[arg-type]
    "torch-stream": lambda: of_own_stream(torch.Generator().manual_seed(1), drawn),
    "python-stream": lambda: of_own_stream(random.Random(1), lambda stream: stream.randrange(8)),
    "numpy-stream": lambda: of_own_stream(np.random.default_rng(1), lambda stream: int(stream.integers(8))),
}
STAYS: dict[str, Callable[[], Iterator[Any]]] = {
    "streams-of-torch": of_torchs_stream,
    "the-same": lambda: itertools.repeat(DATA),
}


class Loop:
    """Steps as a loop of one's own makes them, where the ``where`` of its data is a local, an attribute, ...."""

    def __init__(self, made: Iterator[Any]) -> None:
        self.inner = made

    def train(self, steps: int, take: bool = True) -> None:
        iterators = LastingIterators()
        for _ in range(steps):
            iterators.look(sys._getframe())
            if take:
                next(self.inner)


def train_local(made: Iterator[Any]) -> None:
    iterators, batches = LastingIterators(), made
    for _ in range(5):
        iterators.look(sys._getframe())
        next(batches)


def train_in_list(made: Iterator[Any]) -> None:
    chunks = [made]
    del made
    iterators = LastingIterators()
    for _ in range(5):
        iterators.look(sys._getframe())
        next(chunks[0])


def train_in_dict(made: Iterator[Any]) -> None:
    streams = {"train": made}
    del made
    iterators = LastingIterators()
    for _ in range(5):
        iterators.look(sys._getframe())
        next(streams["train"])


@pytest.mark.parametrize("kind", MOVES)
def test_what_moves_from_step_to_step_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(UnrecoverableError, match=r"the iterator (made|batches) was made before the first step"):
        train_local(MOVES[kind]())


@pytest.mark.parametrize("kind", STAYS)
def test_what_has_no_place_of_its_own_is_as_good_after_a_fault(kind: str) -> None:
    train_local(STAYS[kind]())


def test_it_is_found_in_attributes_and_containers() -> None:
    with pytest.raises(UnrecoverableError, match=r"the iterator self\.inner "):
        Loop(by_index()).train(5)
    with pytest.raises(UnrecoverableError, match=r"the iterator chunks\[0\] "):
        train_in_list(by_index())
    with pytest.raises(UnrecoverableError, match=r"the iterator streams\['train'\] "):
        train_in_dict(by_index())


def test_what_goes_through_the_steps_themselves_is_no_data() -> None:
    """Such as a progress bar, and what it is made of."""
    steps: Any = LoopTraining.steps(cast(Any, None), 9)

    def counting() -> Iterator[int]:
        count = 0
        yield count
        for step in steps:
            count += 1
            yield step

    bar = counting()
    next(bar)
    for each in (steps, bar, zip(steps, DATA), enumerate(bar), iter(map(str, bar))):
        assert _follows_steps(each)
    assert not _follows_steps(by_index())
    shown = tqdm(steps, disable=True)
    assert [_follows_steps(each) for _, each in _iterators_in({"shown": shown})] == [True]


def test_it_is_refused_in_the_third_step_and_not_if_nobody_takes_from_it() -> None:
    Loop(by_index()).train(2)
    Loop(by_index()).train(9, take=False)


def test_one_that_is_made_inside_of_the_loop_is_not_refused() -> None:
    iterators, batches = LastingIterators(), None
    for _ in range(5):
        iterators.look(sys._getframe())
        batches = batches or by_index()
        next(batches)


def test_looking_keeps_nothing_of_the_frame_alive() -> None:
    class Large:
        pass

    iterators, large = LastingIterators(), Large()
    gone = weakref.ref(large)
    iterators.look(sys._getframe())
    del large
    assert gone() is None


def test_a_loaders_iterator_gives_in_one_step_or_has_begun_in_the_loop() -> None:
    iterators = LastingIterators()
    before, inside = object_of_loader(), object_of_loader()
    iterators.begin_pass(inside)
    for step in (1, 2):
        iterators.give(inside, step)
    iterators.give(before, 2)
    iterators.give(before, 2)
    with pytest.raises(UnrecoverableError, match="an iterator of a DataLoader was made before"):
        iterators.give(before, 3)


def object_of_loader() -> object:
    return iter(DataLoader(DATA, batch_size=2))  # type: ignore[arg-type]
