"""Test what belongs to an adapter, and what the base model is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.recovery import PEFTCheckpointManager


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("layers.0.linear_qkv.adapter.linear_in.weight", True),
        ("layers.0.adapters", True),
        ("layers.0.linear_qkv.to_wrap.weight", False),
        ("layers.0.adapters.weight", False),
        ("a.name.of.its.own", True),
        (("model", 0, "layers.0.linear_qkv.adapter.linear_in.weight"), True),
        (("model", 1, "a.name.of.its.own"), True),
        (("model", 0, "layers.0.linear_qkv.to_wrap.weight"), False),
        (("optimizer", 0, 0, 3, "exp_avg"), True),
        (("layers.0.weight", torch.nn.Parameter(torch.ones(1))), True),
        (("layers.0.weight", torch.nn.Parameter(torch.ones(1), requires_grad=False)), False),
    ],
)
def test_adapter_keys(key: Any, expected: bool) -> None:
    manager = PEFTCheckpointManager()
    manager.params_to_save = {"a.name.of.its.own"}
    assert manager.is_adapter_key(key) is expected


def test_nothing_is_a_base_model_before_it_is_known_what_is_trained() -> None:
    manager = PEFTCheckpointManager(enable_offload=True)
    assert manager.enable_offload
    assert manager.params_to_save == set()
    manager.maybe_offload_checkpoint()
    assert manager.base_model_weights is None
    assert manager.base_model_keys_to_extract is None
