"""Provide layers on the CPU for what Megatron-core leaves to TransformerEngine or CUDA kernels.

Megatron's own layers refuse sequence parallelism ("not supported by torch LayerNorm"), context parallelism ("only
supported by TEDotProductAttention!") and the grouped GEMM. All the rest needs neither: the groups, the split of
a batch, the gradients' reductions, the optimizer. What is here fills the gap, so that the rest can be tested.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


def parallel_layers(config: Any) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage, which may be sequence or context parallel."""
    layer = copy.deepcopy(get_gpt_layer_local_spec(normalization=config.normalization))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    layers: list[ModuleSpec] = [layer] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


class Norm(torch.nn.LayerNorm):
    """Implements a layer norm whose gradients Megatron sums over the ranks that each see a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ContextParallelAttention(DotProductAttention):
    """Computes the attention of this rank's queries to the keys and values of all context-parallel ranks."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # the base class insists on it
        super().__init__(alone, *args, **{**kwargs, "cp_comm_type": None})

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather the keys and values of all ranks, and attend as the base class does."""
        ranks = parallel_state.get_context_parallel_world_size()
        if ranks > 1:
            key, value = (_Gather.apply(each) for each in (key, value))
            rank = parallel_state.get_context_parallel_rank()
            places = torch.arange(key.size(0))
            here = _places_of(rank, ranks, key.size(0))
            there = torch.cat([_places_of(other, ranks, key.size(0)) for other in range(ranks)])
            assert sorted(there.tolist()) == places.tolist()
            attention_mask = (there[None, :] > here[:, None])[None, None]
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


def _places_of(rank: int, ranks: int, length: int) -> torch.Tensor:
    """Return which tokens of a sequence Megatron gives to a rank: a piece of its beginning and one of its end."""
    piece = length // (2 * ranks)
    return torch.cat([torch.arange(start * piece, (start + 1) * piece) for start in (rank, 2 * ranks - rank - 1)])


class _Gather(torch.autograd.Function):
    """Concatenates the parts of all ranks, and sums the gradients of each rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        group = parallel_state.get_context_parallel_group()
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient.chunk(group.size())[group.rank()].contiguous()


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
        """Multiply each expert's tokens by its weights."""
        parts = tokens.split(tokens_of.tolist())
        return torch.cat([part @ (weight.t() if trans_b else weight) for part, weight in zip(parts, weights)])
