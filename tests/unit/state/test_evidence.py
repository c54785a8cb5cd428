"""Test that other weights than those of a step boundary are noticed, whichever way they were written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkpointless.state.evidence import Witness, is_same


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
    witness = Witness(weights)
    before = witness.take()
    change(weights)
    assert is_same(before, witness.take()) is not is_other


def test_it_is_small_whatever_there_is() -> None:
    odd = [torch.zeros(0), torch.tensor(1.0), torch.zeros(3, 4).t(), torch.zeros(2, device="meta")]
    odd += [torch.tensor(float("nan")), torch.ones(2).to_sparse(), torch.ones(7, dtype=torch.bfloat16)]
    witness = Witness([*odd, *model().parameters()])
    assert sum(each.numel() for each in witness.take()) <= 8 * 64
    assert is_same(witness.take(), witness.take()), "also where there is no number"
    assert Witness([]).take() == ()
