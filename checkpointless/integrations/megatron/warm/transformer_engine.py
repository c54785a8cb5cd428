"""What TransformerEngine's modules keep from step to step, and when that is nothing but their parameters.

Without FP8, user buffers and delayed gradients they keep process groups, the tracker of random streams of the time
they were built, and notes that every forward pass makes anew. This was read in the sources of :data:`VERSIONS`, of
which Megatron-core 0.15 asks for 2.9, and 0.16 for 2.9 to 2.11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.utils import get_te_version

#: The first and the last version whose sources were read.
VERSIONS = ((2, 6), (2, 12))
#: Packages in which only :data:`CLASSES` are known.
PACKAGES = ("transformer_engine.", "megatron.core.extensions.")

_MEGATRON = "megatron.core.extensions.transformer_engine."
_PYTORCH = "transformer_engine.pytorch."
_ATTENTION = f"{_PYTORCH}attention.dot_product_attention."
_BASE = f"{_PYTORCH}module.base.TransformerEngineBaseModule"
_OPERATION = f"{_PYTORCH}ops.op.BasicOperation"
_SOFTMAX = f"{_ATTENTION}softmax.FusedScaleMaskSoftmax"
_PADDING = (f"{_PYTORCH}module.fp8_padding.Fp8Padding", f"{_PYTORCH}module.fp8_unpadding.Fp8Unpadding")

#: The classes that may be kept. Not among them: layers and blocks as a whole, fused operations.
CLASSES = frozenset(
    {
        f"{_MEGATRON}TELinear",
        f"{_MEGATRON}TEColumnParallelLinear",
        f"{_MEGATRON}TERowParallelLinear",
        f"{_MEGATRON}TELayerNormColumnParallelLinear",
        f"{_MEGATRON}TEGroupedLinear",
        f"{_MEGATRON}TEColumnParallelGroupedLinear",
        f"{_MEGATRON}TERowParallelGroupedLinear",
        f"{_MEGATRON}TEDotProductAttention",
        f"{_PYTORCH}module.linear.Linear",
        f"{_PYTORCH}module.layernorm_linear.LayerNormLinear",
        f"{_PYTORCH}module.grouped_linear.GroupedLinear",
        f"{_PYTORCH}module.layernorm.LayerNorm",
        f"{_PYTORCH}module.rmsnorm.RMSNorm",
        f"{_PYTORCH}ops.op.FusibleOperation",
        f"{_PYTORCH}ops.basic.layer_norm.LayerNorm",
        f"{_PYTORCH}ops.basic.rmsnorm.RMSNorm",
        f"{_ATTENTION}dot_product_attention.DotProductAttention",
        f"{_ATTENTION}backends.FlashAttention",
        f"{_ATTENTION}backends.FusedAttention",
        f"{_ATTENTION}backends.UnfusedDotProductAttention",
        _BASE,
        _OPERATION,
        _SOFTMAX,
        *_PADDING,
    }
)
#: Attributes that a forward pass sets before it reads them, by the class that has them.
_NOTES: Mapping[str, frozenset[str]] = {
    _BASE: frozenset(
        {
            "activation_dtype",
            "allow_different_data_and_param_types",
            "forwarded_at_least_once",
            "fp8_parameters",
            "is_first_microbatch",
        }
    ),
    _SOFTMAX: frozenset({"attn_mask_type", "input_in_bf16", "input_in_float16", "input_in_fp16"}),
    **dict.fromkeys(_PADDING, frozenset({"align_size"})),
}
#: What must not be set in a module that is kept, and what it would mean.
_MUST_NOT_BE: Mapping[str, Mapping[str, str]] = {
    _BASE: {
        "fp8": "FP8's scales",
        "fp8_calibration": "FP8's scales",
        "fp8_parameters": "parameters in FP8",
        "primary_weights_in_fp8": "parameters in FP8",
        "fp8_meta_tensors_initialized": "FP8's scales",
        "_fp8_workspaces": "weights in FP8",
        "wgrad_accumulation_and_reduce_hooks": "gradients that are still to be computed",
        "fsdp_group": "shards of FSDP",
        "symmetric_ar_type": "symmetric memory of a process group",
        **{
            f"ub_{name}": "user buffers of a process group"
            for name in (
                "bulk_dgrad",
                "bulk_wgrad",
                "overlap_ag",
                "overlap_ag_dgrad",
                "overlap_ag_fprop",
                "overlap_rs",
                "overlap_rs_dgrad",
                "overlap_rs_fprop",
            )
        },
    },
    _OPERATION: {"_fp8_metas": "FP8's scales", "_quantizers": "FP8's scales"},
}


def kinds_of(module: torch.nn.Module) -> list[str]:
    """Return the full names of a module's class and its bases."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


def notes_of(module: torch.nn.Module) -> frozenset[str]:
    """Return the attributes of a module that each of its forward passes makes anew."""
    return frozenset().union(*(_NOTES[kind] for kind in kinds_of(module) if kind in _NOTES))


def obstacle(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return why one of TransformerEngine's modules cannot be kept, in a phrase; None: all can, or there are none.

    Args:
        modules: all modules of a model.
    """
    there_are = False
    for module in modules:
        kinds = kinds_of(module)
        there_are = there_are or any(kind.startswith(PACKAGES) for kind in kinds)
        for kind, names in _MUST_NOT_BE.items():
            kept = _kept(module, names) if kind in kinds else None
            if kept is not None:
                return f"{type(module).__qualname__} keeps {kept}"
    release = get_te_version().release[:2] if there_are else VERSIONS[0]
    if not VERSIONS[0] <= release <= VERSIONS[1]:
        return f"it is not known what TransformerEngine {'.'.join(map(str, release))} keeps from step to step"
    return None


def _kept(module: Any, names: Mapping[str, str]) -> str | None:
    """Return what a module keeps besides its parameters, in a phrase."""
    values = vars(module)
    for name, meaning in names.items():
        if values.get(name):
            return meaning
    if any((values.get("quantizers") or {}).values()):
        return "FP8's scales"
    if getattr(values.get("wgrad_store"), "enabled", False):
        return "gradients that are still to be computed"
    return None


def reset(module: torch.nn.Module) -> None:
    """Let a module's next forward pass be one of a first micro-batch."""
    if _BASE in kinds_of(module) and hasattr(module, "is_first_microbatch"):
        module.is_first_microbatch = True  # type: ignore[assignment]
