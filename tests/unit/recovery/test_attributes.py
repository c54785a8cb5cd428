"""Test that every change of what a module keeps in an attribute is noticed, or the attribute refused."""

from __future__ import annotations

import functools
import random
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from checkpointless.recovery.training.attributes import Attributes, UnknownValueError


class Settings:
    """Settings of a model, as a user writes them."""

    def __init__(self) -> None:
        self.width, self.layers = 8, [1, 2]
        self.me: Settings | None = self


def counter() -> Callable[[], int]:
    """Return a function with a state."""
    count = 0

    def add() -> int:
        nonlocal count
        count += 1
        return count

    return add


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a list": (lambda: [1, "two", None], lambda value: value.append(3)),
    "a list within": (lambda: {"a": ([],)}, lambda value: value["a"][0].append(1)),
    "a number of another type": (lambda: [1], lambda value: value.__setitem__(0, True)),
    "the order of a dict": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "a set": (lambda: {1, 2}, lambda value: value.discard(1)),
    "a queue": (lambda: deque([1], maxlen=3), lambda value: value.append(1)),
    "a function's closure": (counter, lambda value: value()),
    "a partial's argument": (lambda: functools.partial(print, []), lambda value: value.args[0].append(1)),
    "an object": (Settings, lambda value: setattr(value, "width", 9)),
    "an object within": (lambda: [Settings()], lambda value: value[0].layers.clear()),
    "a bound method's object": (lambda: deque([Settings().__init__]), lambda value: value[0].__self__.layers.pop()),  # type: ignore[misc]
    "a namespace": (lambda: [types.MethodType(print, [1])], lambda value: value[0].__self__.append(1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    make, apply = CHANGES[change]
    value = make()
    attributes = Attributes([])
    before = attributes.picture(value)
    assert attributes.picture(value) == before
    apply(value)
    assert attributes.picture(value) != before


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        [torch.ones(2)],
        torch.nn.Linear(1, 1),
        torch.Generator(),
        random.Random(1),
        threading.Lock(),
        iter([1]),
        (each for each in [1]),
        bytearray(b"1"),
        functools.partial(print, torch.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_change_unseen_is_refused(value: object) -> None:
    with pytest.raises(UnknownValueError):
        Attributes([]).picture(value)


def test_what_is_referred_to_weakly_is_looked_at() -> None:
    tensor = torch.ones(1)
    assert Attributes([tensor]).picture(weakref.ref(tensor)) == Attributes([tensor]).picture(weakref.ref(tensor))
    with pytest.raises(UnknownValueError, match="a tensor"):
        Attributes([]).picture(weakref.ref(tensor))


def test_parts_are_known_by_their_identity() -> None:
    layer = torch.nn.LSTM(2, 2)  # which refers to its weights in lists, weakly, too
    attributes = Attributes([layer, *layer.parameters()])
    before = {name: attributes.picture(value) for name, value in vars(layer).items() if name != "_parameters"}
    layer(torch.ones(1, 1, 2))[0].sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    now = {name: attributes.picture(value) for name, value in vars(layer).items() if name != "_parameters"}
    assert now == before
    assert attributes.picture([layer]) != Attributes([layer]).picture([1])


def test_an_object_that_is_more_than_its_attributes_is_refused() -> None:
    class Own(random.Random):
        """A generator of the user's."""

    class Slotted:
        __slots__ = ("__dict__", "calls")

    for value in (Own(1), Slotted()):
        with pytest.raises(UnknownValueError, match=f"a .*{type(value).__name__}, of which it is not known"):
            Attributes([]).picture(value)


def test_more_than_is_compared_is_refused() -> None:
    with pytest.raises(UnknownValueError, match="more values"):
        Attributes([]).picture([[] for _ in range(100_001)])
