"""Test which precisions of training, and which kernels that no abort ends, are refused."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointless.integrations.compat.precision import unabortable, unsupported, unsupported_in_a_loop

HYBRID, FLEX = {"fp8": "hybrid"}, {"moe_token_dispatcher_type": "flex"}


class Recipe(str, Enum):
    BLOCKWISE = "blockwise"
    CUSTOM = "custom"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fp8": None, "fp4": None, "fp8_param": True},
        {"fp8": "hybrid"},
        {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_param": False, "fp8_param_gather": None},
        {"fp8": "hybrid", "fp8_recipe": "tensorwise", "use_transformer_engine_op_fuser": True},
        {"fp8": "hybrid", "fp8_recipe": Recipe.BLOCKWISE},
        {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
        {"fp8": "hybrid", "fp8_param": True, "fp8_param_gather": True},
        {"fp8": "hybrid", "fp8_param": True, "fp8_recipe": "tensorwise", "fp16": True},
    ],
)
def test_scales_and_recipes_without_any_are_carried(config: dict[str, Any]) -> None:
    assert unsupported(SimpleNamespace(**config)) is None


@pytest.mark.parametrize(
    ("config", "todo"),
    [
        ({"fp4": "e2m1"}, "set fp4=None"),
        ({"fp8": "hybrid", "fp8_param": True, "fp16": True}, "set fp8_param=False or fp8_recipe='tensorwise'"),
        ({"fp8": "hybrid", "fp8_params": True, "precision": "16-mixed"}, "set fp8_params=False"),
        ({"fp8": "hybrid", "fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "set fp8_param_gather=False"),
        ({"fp8": "hybrid", "fp8_multi_head_attention": True}, "set fp8_multi_head_attention=False"),
        ({"fp8": "hybrid", "fp8_dot_product_attention": True}, "set fp8_dot_product_attention=False"),
        ({"fp8": "hybrid", "use_transformer_engine_op_fuser": True}, "set use_transformer_engine_op_fuser=False"),
        (HYBRID | {"fp8_recipe": Recipe.CUSTOM}, "'custom' keeps: set fp8_recipe to one of delayed, tensorwise"),
    ],
)
def test_what_keeps_more_is_refused(config: dict[str, Any], todo: str) -> None:
    reason = unsupported(SimpleNamespace(**config))
    assert reason is not None
    assert todo in reason
    assert "\n" not in reason


def test_a_loop_of_ones_own_has_recipes_without_scales_only() -> None:
    def module(**config: Any) -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(**config))

    plain, fine = SimpleNamespace(), module(fp8="hybrid", fp8_recipe="tensorwise")
    assert unsupported_in_a_loop([plain, fine]) is None
    assert "set fp8_recipe='tensorwise'" in str(unsupported_in_a_loop([plain, fine, module(fp8="hybrid")]))
    kept = module(fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)
    assert "(fp8_param=False)" in str(unsupported_in_a_loop([plain, kept]))
    quantised = torch.nn.Linear(1, 1)
    assert unsupported_in_a_loop([quantised]) is None
    quantised.weight._quantizer = object()  # type: ignore[attr-defined]
    assert "(fp8_param=False)" in str(unsupported_in_a_loop([quantised]))
    assert "set fp4=None" in str(unsupported_in_a_loop([module(fp4="e2m1")]))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tp_comm_overlap": True}, "a kernel of TransformerEngine's user buffers cannot be freed"),
        (FLEX | {"moe_enable_deepep": True}, "set moe_enable_deepep=False, moe_token"),
        (FLEX, "set moe_token_dispatcher_type='alltoall', or CHECKPOINTLESS_SPINN"),
    ],
)
def test_kernels_that_wait_for_peers_by_themselves_are_refused(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object], words: str
) -> None:
    reason = unabortable(SimpleNamespace(**config))
    assert reason is not None
    assert words in reason
    assert "\n" not in reason
    monkeypatch.setenv("CHECKPOINTLESS_SPINNING_KERNELS", "1")
    assert unabortable(SimpleNamespace(**config)) is None


@pytest.mark.parametrize(
    "config",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(tp_comm_overlap=False, moe_enable_deepep=None, moe_token_dispatcher_type="alltoall"),
        SimpleNamespace(tp_comm_overlap=object()),
    ],
)
def test_other_configs_are_not(config: object) -> None:
    assert unabortable(config) is None
