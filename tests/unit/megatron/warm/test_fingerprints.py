"""Test that fingerprints are equal where values mean the same, and only there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs Megatron-core")

from checkpointless.integrations.megatron.warm import _differing, _fingerprint, fingerprints

pytestmark = pytest.mark.nemo


@dataclass
class Settings:
    size: int
    start: Any


class Opaque:
    """A value that cannot be looked into."""

    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


class Pickled:
    """A value that says itself what it is."""

    def __init__(self, number: int) -> None:
        self.number, self.noise = number, object()

    def __getstate__(self) -> dict[str, int]:
        return {"number": self.number}


def normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return functools.partial(torch.nn.init.normal_, std=sigma)


def hook(*_: object, key: int = 0) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (normal(0.1), normal(0.1), True),
        (normal(0.1), normal(0.2), False),
        (functools.partial(hook, 1, key=2), functools.partial(hook, 1, key=2), True),
        (functools.partial(hook, 1, key=2), functools.partial(hook, 1, key=3), False),
        (functools.partial(hook, 1), functools.partial(print, 1), False),
        ([1, {"a": (2, None)}], [1, {"a": (2, None)}], True),
        ([1, {"a": (2, None)}], [1, {"a": (3, None)}], False),
        (Settings(1, torch.float32), Settings(1, torch.float32), True),
        (Settings(1, torch.float32), Settings(1, torch.bfloat16), False),
        (torch.ones(2), torch.zeros(2), False),
        (lambda: 1, lambda: 1, False),
        (torch, torch, True),
        (torch.nn.Identity, torch.nn.Identity, True),
        (Opaque(), Opaque(), False),
        (Pickled(1), Pickled(1), True),
        (Pickled(1), Pickled(2), False),
        (None, 0, False),
    ],
)
def test_what_is_alike(then: Any, now: Any, same: bool) -> None:
    assert (_fingerprint(then) == _fingerprint(now)) is same
    before, after = fingerprints({"a": 1, "b": then}), fingerprints({"a": 1, "b": now})
    assert _differing(before, after) == (None if same else "b")


def test_a_picture_stays_as_it_was() -> None:
    value: dict[str, Any] = {"a": [1], "c": Settings(1, [2])}
    before = _fingerprint(value)
    value["a"].append(2)
    assert _fingerprint(value) != before
    value["a"].pop()
    assert _fingerprint(value) == before
    value["c"].start.append(3)
    assert _fingerprint(value) != before


def test_what_is_shared_is_like_what_is_equal() -> None:
    one: list[int] = []
    assert _fingerprint([one, one]) == _fingerprint([[], []])


def test_a_function_that_cannot_be_digested_is_known_by_its_identity() -> None:
    one, other = (lambda: 1), (lambda: 1)
    assert _fingerprint(one) == _fingerprint(one)
    assert _fingerprint(one) != _fingerprint(other)


def _counting(counts: dict[str, int]) -> Callable[[], int]:
    return lambda: counts["n"]


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "value", [bytes(65 << 20), CIRCLE, _counting({"n": 1})], ids=["large", "circle", "closure"]
)
def test_what_cannot_be_digested_and_may_have_changed_equals_nothing(value: object) -> None:
    assert _fingerprint(value) != _fingerprint(value)
