"""Test that other weights than those of a step boundary are noticed, whichever way they were written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkpointless.state.journal import _WeightWatch


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(20)))


def put_back(weights: list[torch.nn.Parameter]) -> None:
    for each in weights:
        each.data = each.data.clone()


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (lambda weights: [each.data.add_(1e-3) for each in weights], True),
        (lambda weights: [each.data.zero_() for each in weights], True),
        (put_back, False),  # the same bytes in another place
        (lambda weights: None, False),
        (lambda weights: [each.sum().backward() for each in weights], False),
    ],
    ids=["moved", "zeroed", "put-back", "nothing", "backward"],
)
def test_weights_that_were_exchanged_are_noticed(
    change: Callable[[list[torch.nn.Parameter]], object], is_other: bool
) -> None:
    weights = list(model().parameters())
    watch = _WeightWatch(lambda: weights)
    before = watch.see()
    change(weights)
    assert watch.is_other(before) is is_other
    assert not watch.is_written(before), "what is written through the data is not counted"


def test_it_is_small_whatever_there_is() -> None:
    odd = [torch.zeros(0), torch.tensor(1.0), torch.zeros(3, 4).t(), torch.zeros(2, device="meta")]
    odd += [torch.tensor(float("nan")), torch.ones(2).to_sparse(), torch.ones(7, dtype=torch.bfloat16)]
    weights = [*odd, *model().parameters()]
    watch = _WeightWatch(lambda: weights)
    assert sum(each.numel() for each in watch.see()[1]) <= 8 * 64
    assert not watch.is_other(watch.see()), "also where there is no number"
    assert _WeightWatch(lambda: []).see() == ([], ())
