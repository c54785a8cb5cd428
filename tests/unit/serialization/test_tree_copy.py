"""A copy of a state is equal to it, and nothing that changes reaches it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import typing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import digest_value
from checkpointless.state.serialization.state_tree import copies_of
from tests.unit.serialization.trees import Loud, Word, back, same, trees


@given(trees)
@example({"\ud800"})
def test_a_copy_is_equal_and_has_the_digest(tree: Any) -> None:
    copied = state_tree.copy(tree)
    assert same(copied, tree)
    assert digest_value(copied) == digest_value(tree) == digest_value(back(tree))


def test_nothing_that_changes_reaches_a_copy() -> None:
    tree: dict[str, Any] = {
        "t": torch.zeros(3),
        "l": [np.zeros(2)],
        "d": collections.deque([1]),
        "p": torch.nn.Parameter(torch.ones(1)),
    }
    copied = state_tree.copy(tree)
    tree["t"].add_(1)
    tree["l"][0] += 1
    tree["l"].append(1)
    tree["d"].append(2)
    assert copied["t"].eq(0).all()
    assert len(copied["l"]) == 1
    assert not copied["l"][0].any()
    assert list(copied["d"]) == [1]
    assert type(copied["p"]) is torch.nn.Parameter
    assert copied["p"].requires_grad


# --- What is taken at a moment and put into its form later --------------------------------------------------------


NAN = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)[0]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.tensor(1.5)],
        [torch.tensor(0.1), torch.tensor(-0.0), torch.tensor(float("inf")), torch.tensor(1e-45)],
        [torch.tensor(0.1, dtype=torch.float64), torch.tensor(2**60 + 1), torch.tensor(True)],
        [NAN, torch.tensor(2.0), NAN.clone()],
        [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(3.0, dtype=torch.bfloat16)],
        [torch.tensor([1.0, 2.0]), torch.tensor(3.0), torch.tensor([]), torch.tensor(1 + 2j)],
    ],
)
def test_copies_have_the_bits_that_the_tensors_had(tensors: list[torch.Tensor]) -> None:
    before = [bits(each) for each in tensors]
    copies = copies_of(tensors)
    for each in tensors:
        each.zero_()
    assert [bits(each) for each in copies()] == before


# --- Classes that are registered, and numbers that are no floats, come back as what they were ---------------------


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
