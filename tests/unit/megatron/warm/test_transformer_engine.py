"""Test which of TransformerEngine's modules may be kept, on classes with their names and attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from checkpointless.integrations.megatron.warm import transformer_engine
from checkpointless.integrations.megatron.warm.known_classes import blueprint_of, unknown_class

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core


def named(full_name: str, base: type = torch.nn.Module) -> Any:
    """Return a class of a module of this name."""
    package, _, name = full_name.rpartition(".")
    return type(name, (base,), {"__module__": package})


BASE = named("transformer_engine.pytorch.module.base.TransformerEngineBaseModule")
LINEAR = named("transformer_engine.pytorch.module.linear.Linear", BASE)
ROW = named(
    "megatron.core.extensions.transformer_engine.TERowParallelLinear",
    named("megatron.core.extensions.transformer_engine.TELinear", LINEAR),
)
NORM = named(
    "transformer_engine.pytorch.ops.basic.rmsnorm.RMSNorm",
    named(
        "transformer_engine.pytorch.ops.op.BasicOperation",
        named("transformer_engine.pytorch.ops.op.FusibleOperation"),
    ),
)


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have version 2.9 installed."""
    monkeypatch.setattr(transformer_engine, "get_te_version", lambda: Version("2.9.0"))


def row() -> Any:
    """Return a layer as it is built."""
    layer = ROW()
    layer.fp8, layer.fp8_meta = False, {"fp8_checkpoint": False, "fp8_group": None}
    layer.quantizers, layer._fp8_workspaces = {"scaling_fwd": {}, "scaling_bwd": {}}, {}
    layer.activation_dtype, layer.is_first_microbatch, layer.use_bias = None, True, True
    layer.wgrad_store = SimpleNamespace(context=None, enabled=False)
    return layer


def norm() -> Any:
    """Return a normalization as it is built."""
    each = NORM()
    each._fp8_metas = each._quantizers = None
    return each


def run(layer: Any) -> None:
    """Note what a forward pass notes."""
    layer.activation_dtype, layer.is_first_microbatch = torch.bfloat16, False
    layer.forwarded_at_least_once = True
    layer.fp8_parameters = layer.allow_different_data_and_param_types = False


def test_what_a_forward_pass_notes_is_no_change() -> None:
    layer = row()
    built = blueprint_of([layer])
    run(layer)
    assert built.difference([layer]) is None
    assert transformer_engine.obstacle([layer, norm()]) is None
    transformer_engine.reset(layer)
    assert layer.is_first_microbatch
    layer.use_bias = False
    assert "use_bias" in str(built.difference([layer]))


CHANGES = {
    "FP8's scales": lambda layer: setattr(layer, "fp8", True),
    "weights in FP8": lambda layer: layer._fp8_workspaces.update(weight=object()),
    "parameters in FP8": lambda layer: setattr(layer, "primary_weights_in_fp8", True),
    "user buffers of a process group": lambda layer: setattr(layer, "ub_overlap_rs_fprop", True),
    "gradients that are still to be computed": lambda layer: setattr(layer.wgrad_store, "enabled", True),
    "symmetric memory of a process group": lambda layer: setattr(layer, "symmetric_ar_type", "one_shot"),
    "shards of FSDP": lambda layer: setattr(layer, "fsdp_group", object()),
}


@pytest.mark.parametrize("kept", CHANGES)
def test_what_belongs_to_a_step_or_a_group_is_not_kept(kept: str) -> None:
    layer = row()
    CHANGES[kept](layer)
    assert transformer_engine.obstacle([torch.nn.ReLU(), layer]) == f"TERowParallelLinear keeps {kept}"


def test_quantizers_are_scales() -> None:
    layer, operation = row(), norm()
    layer.quantizers["scaling_fwd"][0] = object()
    assert transformer_engine.obstacle([layer]) == "TERowParallelLinear keeps FP8's scales"
    operation._quantizers = {"forward": [], "backward": []}
    assert transformer_engine.obstacle([operation]) == "RMSNorm keeps FP8's scales"


@pytest.mark.parametrize(
    ("release", "known"), [("2.5.0", False), ("2.6.0", True), ("2.12.1", True), ("3.0", False)]
)
def test_only_versions_that_were_read(monkeypatch: pytest.MonkeyPatch, release: str, known: bool) -> None:
    monkeypatch.setattr(transformer_engine, "get_te_version", lambda: Version(release))
    assert (transformer_engine.obstacle([row()]) is None) == known
    assert transformer_engine.obstacle([torch.nn.ReLU()]) is None, "no matter what is installed"


def test_only_classes_that_were_read() -> None:
    assert unknown_class([row()]) is None
    assert unknown_class([norm()]) is None
    for name in (
        "transformer_engine.pytorch.transformer.TransformerLayer",
        "transformer_engine.pytorch.ops.sequential.Sequential",
        "megatron.core.extensions.transformer_engine.TEFusedMLP",
        "megatron.core.extensions.kitchen.KitchenLinear",
    ):
        assert unknown_class([torch.nn.Sequential(named(name, BASE)())]) == name
