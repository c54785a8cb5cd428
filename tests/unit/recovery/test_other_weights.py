"""Test that weights which stood in for the trained ones are put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.torch.plain import PlainTraining


class Journal:
    """Counts how often weights are noted as those of the step boundary."""

    def __init__(self, written: bool = False) -> None:
        self.written, self.noted = written, 0

    def are_written(self) -> bool:
        return self.written

    def note_weights(self) -> None:
        self.noted += 1


def training_of(weights: list[torch.Tensor], journal: Journal) -> PlainTraining:
    training: Any = PlainTraining.__new__(PlainTraining)
    training.state, training._journal = SimpleNamespace(weights=lambda: weights), journal
    return training


def test_weights_that_are_put_back_are_so_to_the_bit_also_on_the_way_of_a_fault() -> None:
    weights, journal = [torch.ones(3), torch.zeros(2)], Journal()
    training = training_of(weights, journal)
    with training.other_weights():
        weights[0].mul_(2)
        weights[0].div_(2)
    assert journal.noted == 1
    with pytest.raises(IndexError), training.other_weights():
        weights[1].add_(0)[9]
    assert journal.noted == 2


def test_weights_that_stay_exchanged_are_refused_and_a_fault_is_told_first() -> None:
    weights, journal = [torch.ones(3)], Journal()
    training = training_of(weights, journal)
    with pytest.raises(UnrecoverableError, match="ended with other parameters"), training.other_weights():
        weights[0][1] = -0.0
    with pytest.raises(IndexError), training.other_weights():
        weights[0].mul_(3)[9]
    assert not journal.noted
