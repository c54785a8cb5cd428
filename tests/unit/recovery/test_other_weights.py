"""Test that weights which stood in for the trained ones are put back."""

from __future__ import annotations

import pytest
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.torch.loop import put_back


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
