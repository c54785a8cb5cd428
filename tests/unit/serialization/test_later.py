"""Test what is taken at a moment and put into its form later."""

from __future__ import annotations

import pytest
import torch

from checkpointless.state.serialization.state_tree import Later, copies_of

NAN = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)[0]


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_it_is_made_once_and_only_when_it_is_asked_for() -> None:
    made: list[int] = []
    later = Later(lambda: made.append(1) or [3])  # type: ignore[func-returns-value]
    assert made == []
    assert later() is later()
    assert made == [1]


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


def test_copies_have_no_gradients() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    copies = copies_of([weight * 2, torch.tensor([1.0], requires_grad=True), weight])()
    assert [each.requires_grad for each in copies] == [False] * 3
    assert [each.item() for each in copies] == [4.0, 1.0, 2.0]
