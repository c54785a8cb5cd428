"""Stands for the linear layer behind a normalization."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.module.linear import Linear


class LayerNormLinear(Linear):
    """Keeps what `LayerNormLinear` keeps: `module/layernorm_linear.py:1190` to 1290.

    There it is no `Linear`; the base of both says what is kept in either case.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "LayerNorm"
        assert not zero_centered_gamma
        self.eps, self.return_layernorm_output = eps, return_layernorm_output  # adapters set it
        dtype = options.get("params_dtype", torch.float32)
        self.init_weight("layer_norm_weight", torch.nn.Parameter(torch.ones(in_features, dtype=dtype)), None)
        self.init_weight("layer_norm_bias", torch.nn.Parameter(torch.zeros(in_features, dtype=dtype)), None)
        for each in (self.layer_norm_weight, self.layer_norm_bias):  # of which each rank sees a part
            each.sequence_parallel = self.sequence_parallel  # type: ignore[assignment]

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Normalize and multiply; with `return_layernorm_output` return what was normalized, too."""
        normed = F.layer_norm(inp, (inp.shape[-1],), self.layer_norm_weight, self.layer_norm_bias, self.eps)
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        return (*out, normed) if self.return_bias else (out, normed)
