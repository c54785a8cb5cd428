"""Stands for the normalization as an operation."""

from __future__ import annotations

import torch
from transformer_engine.pytorch.ops.op import BasicOperation


class LayerNorm(BasicOperation):
    """Keeps what the operation keeps: `ops/basic/layer_norm.py:81` to 135."""

    def __init__(
        self, size: int, *, eps: float, dtype: torch.dtype, device: str, zero_centered_gamma: bool
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=device))
        self._sm_margins = {"forward": 0, "backward": 0, "inference": 0}
