"""Classes that are registered, and numbers that are no floats, come back as what they were."""

from __future__ import annotations

import dataclasses
import enum
import fractions
import typing
from decimal import Decimal
from typing import Any

import pytest
import torch

from checkpointless.state.serialization import state_tree
from tests.unit.serialization.trees import Loud, Word, back, same


@state_tree.register_plain_type
class Mode(enum.Enum):
    FAST = "fast"


@state_tree.register_plain_type
class Options(enum.Flag):
    A = 1
    B = 2


@state_tree.register_plain_type
@dataclasses.dataclass(frozen=True)
class Window:
    size: int
    inner: Any


@state_tree.register_plain_type
class Span(typing.NamedTuple):
    start: int
    stop: torch.Tensor


def test_registered_classes_come_back_as_what_they_were() -> None:
    tree = [Mode.FAST, Options.A | Options.B, Window(3, Mode.FAST), {Mode.FAST: 1}, Span(1, torch.ones(2))]
    arrived = back(tree)
    assert arrived[:4] == tree[:4]
    assert type(arrived[4]) is Span
    assert arrived[4].stop.equal(torch.ones(2))


@pytest.mark.parametrize("kind", [dict, Loud, Word, 3])
def test_only_classes_of_plain_parts_can_be_registered(kind: Any) -> None:
    with pytest.raises(TypeError, match="cannot be registered"):
        state_tree.register_plain_type(kind)


def test_decimals_and_fractions() -> None:
    assert same(
        back([Decimal("1.10"), fractions.Fraction(1, 10**40)]), [Decimal("1.10"), fractions.Fraction(1, 10**40)]
    )
