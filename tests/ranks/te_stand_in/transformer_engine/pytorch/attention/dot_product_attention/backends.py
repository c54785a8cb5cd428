"""Stands for the ways to compute attention."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.attention.dot_product_attention.softmax import FusedScaleMaskSoftmax


class UnfusedDotProductAttention(torch.nn.Module):
    """Keeps the tracker's `fork`, bound to the tracker of the time it was built (`backends.py:212`)."""

    def __init__(self, softmax_scale: float, *, attention_dropout: float, attention_dropout_ctx: Any) -> None:
        super().__init__()
        self.softmax_scale, self.attention_type = softmax_scale, "self"
        self.attention_dropout_ctx = attention_dropout_ctx
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = torch.nn.Dropout(attention_dropout)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return attention, of shape [s, b, h * d], of what the mask leaves."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key)
        probabilities = self.scale_mask_softmax(scores, mask, "causal", self.softmax_scale)
        with self.attention_dropout_ctx():
            probabilities = self.attention_dropout(probabilities)
        return torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(2)
