"""Test which numbers in attributes count."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.training.counters import Counters, Owned, put_back
from checkpointless.transfer.tensor_entry import Key


class Own(torch.optim.SGD):
    """An optimizer with attributes of its own."""

    first = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.ready = False
        self.inner: dict[str, Any] = {"n": [0, 1.5]}
        self.drawn = random.Random(1)
        self.tensor = torch.zeros(2)
        self.cache: Any = None


class Quantized(torch.nn.Module):
    """A module whose bytes are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


def _first() -> Own:
    return Own([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("optimizer.first += 1", "Own.first"),
        ("optimizer.inner['n'][0] = 3", "Own.inner.n.0"),
        ("optimizer.drawn.random()", "Own.drawn"),
        ("optimizer.tensor += 1", "Own.tensor"),
        ("optimizer.ready = True", ""),
        ("optimizer.cache = 7", ""),
        ("optimizer.param_groups[0]['lr'] = 0.5", ""),
    ],
)
def test_a_number_that_changes_is_named(change: str, name: str) -> None:
    """What is made once is no count."""
    optimizer = _first()
    counters = Counters([], [optimizer])
    assert counters.counted() == ("", "")
    exec(change, {"optimizer": optimizer})
    assert counters.counted() == (name, "")


class Calls(torch.nn.Module):
    """A module that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Saves(Calls):
    """A module that says what belongs to its state."""

    def get_extra_state(self) -> int:
        return self.calls


def test_modules_that_say_what_is_theirs_and_torchs_own_are_left_alone() -> None:
    calls, saves, dropout = Calls(), Saves(), torch.nn.Dropout(0.1)
    counters = Counters([torch.nn.Sequential(calls, saves, dropout)], [])
    saves.calls, dropout.p = 5, 0.2
    assert counters.counted() == ("", "")
    calls.calls = 1
    assert counters.counted() == ("", "0.calls")


def test_weights_that_are_put_back_are_so_to_the_bit_also_on_the_way_of_a_fault() -> None:
    weights = [torch.ones(3), torch.zeros(2)]
    back: list[str] = []
    with put_back(lambda: weights, lambda: back.append("left")):
        weights[0].mul_(2)
        weights[0].div_(2)
    with pytest.raises(IndexError), put_back(lambda: weights, lambda: back.append("raised")):
        weights[1].add_(0)[9]
    assert back == ["left", "raised"]


def test_weights_that_stay_exchanged_are_refused_and_a_fault_is_told_first() -> None:
    weights = [torch.ones(3)]
    back: list[str] = []
    with pytest.raises(UnrecoverableError, match="other weights stay"), put_back(lambda: weights, back.clear):
        weights[0][1] = -0.0
    with pytest.raises(IndexError), put_back(lambda: weights, lambda: back.append("raised")):
        weights[0].mul_(3)[9]
    assert not back


def test_a_tensor_that_is_gone_is_no_longer_what_it_was() -> None:
    tensors: dict[Key, torch.Tensor] = {("optimizer", 0): torch.ones(2), ("optimizer", 1): torch.ones(2)}
    owned = Owned(lambda: tensors)
    owned.note()
    assert owned.changed() is None
    del tensors["optimizer", 1]
    assert owned.changed() == ("optimizer", 1)
    owned.forget()
    assert owned.changed() is None
