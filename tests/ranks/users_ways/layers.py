"""Provide layers on the CPU for the grouped GEMM, which Megatron-core leaves to CUDA kernels."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.spec_utils import ModuleSpec


def grouped_layers(config: Any) -> ModuleSpec:
    """Return layers whose experts are one grouped matrix product, with a product in place of the CUDA kernel.

    Megatron still keeps, shards and reduces the weights of all experts as one; only its kernel is replaced.
    """
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = _GroupedProduct
    return get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=True)


class _GroupedProduct:
    @staticmethod
    def gmm(
        tokens: torch.Tensor, weights: torch.Tensor, tokens_of: torch.Tensor, trans_b: bool = False
    ) -> torch.Tensor:
        parts = tokens.split(tokens_of.tolist())
        return torch.cat([part @ (weight.t() if trans_b else weight) for part, weight in zip(parts, weights)])
