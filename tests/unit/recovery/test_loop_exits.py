"""Test that a loop which is left by choice is told from one that an error passes, and what is noted of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from checkpointless.recovery.training.loop_exits import LoopExits, is_left_by_choice

Steps = Callable[[], Iterator[int]]


@pytest.fixture
def told() -> list[bool]:
    return []


@pytest.fixture
def steps(told: list[bool]) -> Steps:
    """Return a generator that notes how it is left."""

    def make() -> Iterator[int]:
        try:
            yield from range(3)
        except GeneratorExit:
            told.append(is_left_by_choice(sys._getframe(1)))
            raise

    return make


def test_break_and_return_are_choices(steps: Steps, told: list[bool]) -> None:
    for _ in steps():
        break

    def returns() -> int:
        for step in steps():
            if step == 1:
                return step
        return 0

    assert returns() == 1
    assert told == [True, True]


def test_a_break_behind_what_iterates_in_the_loops_name(steps: Steps, told: list[bool]) -> None:
    """As tqdm does, and zip."""

    def wrapped() -> Iterator[int]:
        yield from steps()

    for _ in wrapped():
        break
    for _ in zip(steps(), range(9)):
        break
    assert told == [True, True]


def test_an_error_is_none(steps: Steps, told: list[bool]) -> None:
    def raising() -> None:
        for _ in steps():
            [][1]

    with pytest.raises(IndexError):
        raising()
    assert told == [False]


def test_what_is_noted_is_put_back_by_the_number_of_the_call() -> None:
    exits = LoopExits()
    assert [exits.begin_call(), exits.begin_call()] == [0, 1]
    exits.leave(0, 4)
    exits.leave(1, 8)
    exits.ends = True
    later = LoopExits()
    later.put(exits.take())
    assert later.ends
    later.resume(exits.own())
    assert later.resumed_in == 1
    assert later.was_left(0, 6)
    assert not later.was_left(1, 6), "its step is still to be made"
    assert not later.was_left(2, 9)
