"""Samples of tensors tell those apart that hold other elements, whatever they are laid out like."""

from __future__ import annotations

import pytest
import torch

from checkpointless.state.serialization.digest import samples

TENSORS = {
    "many": torch.arange(100.0).reshape(10, 10),
    "few": torch.ones(3),
    "one": torch.tensor(2.0),
    "half": torch.full((40,), 0.5, dtype=torch.bfloat16),
    "truth": torch.tensor([True, False]),
    "turned": torch.arange(60.0).reshape(6, 10).t(),
    "part": torch.arange(90.0)[7:50],
    "expanded": torch.ones(1).expand(50),
    "trained": torch.nn.Parameter(torch.ones(4)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_another_element_is_noticed_in_that_tensor_alone(name: str) -> None:
    tensors = {key: each.detach().clone(memory_format=torch.preserve_format) for key, each in TENSORS.items()}
    before = samples(tensors)
    assert before.keys() == TENSORS.keys()
    tensors[name].flatten()[:1].logical_not_() if name == "truth" else tensors[name].mul_(3).add_(1)
    after = samples(tensors)
    assert [key for key in before if before[key] != after[key]] == [name]


def test_the_samples_of_a_large_tensor_are_small() -> None:
    assert len(samples({"large": torch.zeros(100_000)})["large"]) == 32 * 4


def test_what_has_no_storage_is_left_out() -> None:
    nothing = {"empty": torch.empty(0), "meta": torch.empty(4, device="meta"), "sparse": torch.eye(3).to_sparse()}
    assert samples(nothing) == {}
