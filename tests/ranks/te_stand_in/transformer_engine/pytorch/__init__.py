"""Stands for the modules for torch."""

from transformer_engine.pytorch import distributed, ops, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module.layernorm import LayerNorm, RMSNorm
from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, Linear

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "ops",
    "tensor",
]
