"""Test that a flipped bit is one bit, in any tensor."""

import pytest
import torch

from checkpointless.faults.inject import _flip_a_bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_one_bit_is_flipped_and_flipped_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    _flip_a_bit(tensor)
    (changed,) = [byte for byte in tensor.reshape(-1).view(torch.uint8).tolist() if byte]
    assert changed == 1
    _flip_a_bit(tensor)
    assert not tensor.reshape(-1).view(torch.uint8).any()


def test_a_parameter_is_damaged_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    before = parameter.detach().clone()
    _flip_a_bit(parameter)
    assert not torch.equal(parameter, before)
