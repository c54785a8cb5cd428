"""Plain data travels as what it is: values, types, tensors, arrays and what is shared."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from checkpointless.state.serialization import state_tree
from tests.unit.serialization.trees import back, same, trees


@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(back(tree), tree)


@given(trees)
def test_what_is_checked_can_be_split_and_joined(tree: Any) -> None:
    state_tree.check(tree)
    skeleton, tensors = state_tree.split(tree, inline_bytes=0)
    assert tensors == []
    assert same(state_tree.join(skeleton, tensors), tree)


def test_not_a_number_and_infinities() -> None:
    numbers = back([math.nan, math.inf, -math.inf, 0.1, -0.0])
    assert math.isnan(numbers[0])
    assert numbers[1:4] == [math.inf, -math.inf, 0.1]
    assert math.copysign(1, numbers[4]) == -1


@pytest.mark.parametrize("inline", [0, 1 << 20])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...], inline: int) -> None:
    tensor = torch.ones(shape).to(dtype)
    arrived = state_tree.join(*state_tree.split(tensor, inline))
    assert type(arrived) is torch.Tensor
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived.to(torch.complex64), tensor.to(torch.complex64))


@pytest.mark.parametrize("inline", [0, 1 << 20])
def test_how_a_tensor_lies_in_memory_and_what_it_is(inline: int) -> None:
    turned = torch.randn(2, 3, 4).permute(2, 0, 1)
    gaps = torch.randn(8, 8)[::2, 1:3]
    wide = torch.randn(3, 1).expand(3, 5)
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)
    trained = torch.nn.Parameter(torch.randn(3))
    tree = [turned, gaps, wide, conjugate, frozen, trained, torch.zeros(2, requires_grad=True), trained * 2]
    skeleton, tensors = state_tree.split(tree, inline)
    arrived = state_tree.join(skeleton, tensors)
    assert arrived[0].stride() == turned.stride()
    assert all(torch.equal(one, other) for one, other in zip(arrived, tree))
    assert [type(each) for each in arrived] == [type(each) for each in tree]
    assert [each.requires_grad for each in arrived[:7]] == [each.requires_grad for each in tree[:7]]
    if inline == 0:
        assert tensors[0].data_ptr() == turned.data_ptr(), "copied, although it has no gaps"


@pytest.mark.parametrize("inline", [0, 1 << 20])
@pytest.mark.parametrize("dtype", ["<f4", ">i8", "|b1", "<c16", "<U3", "|S2", "<M8[ns]", "|V4", "<f2"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_arrays(dtype: str, shape: tuple[int, ...], inline: int) -> None:
    array = np.arange(max(1, math.prod(shape))).astype("<i8").astype(dtype if dtype != "|V4" else "<i4").view(dtype)
    array = array[: math.prod(shape)].reshape(shape)
    for each in (array, np.asfortranarray(array), array[..., ::-1] if shape else array):
        arrived = state_tree.join(*state_tree.split(each, inline))
        assert type(arrived) is np.ndarray
        assert arrived.dtype.str == dtype
        assert arrived.shape == each.shape
        assert arrived.tobytes() == each.tobytes()
        assert arrived.flags.writeable
    assert not shape or state_tree.join(*state_tree.split(np.asfortranarray(array), inline)).flags.f_contiguous


def test_a_modules_state_keeps_its_versions() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    arrived = back(state)
    assert type(arrived) is collections.OrderedDict
    assert arrived._metadata == state._metadata  # type: ignore[attr-defined]
    torch.nn.BatchNorm1d(2).load_state_dict(arrived)


def test_what_is_shared_stays_shared() -> None:
    tensor, array, items = torch.randn(2000), np.zeros(2000), [1]
    tree: dict[str, Any] = {"a": tensor, "b": [tensor, array], "c": (array, items), "d": items}
    skeleton, tensors = state_tree.split(tree)
    assert len(tensors) == 2
    for each in (state_tree.join(skeleton, tensors), back(tree), state_tree.copy(tree)):
        assert each["a"] is each["b"][0]
        assert each["b"][1] is each["c"][0]
        assert each["d"] is each["c"][1]


def test_what_is_shared_over_and_over_takes_no_more_room() -> None:
    tree: Any = [0]
    for _ in range(60):
        tree = [tree, tree]
    assert len(state_tree.dumps(tree)) < 10_000
    assert len(state_tree.copy(tree)) == 2
