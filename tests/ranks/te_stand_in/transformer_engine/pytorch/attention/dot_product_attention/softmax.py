"""Stands for the softmax with scale and mask."""

from __future__ import annotations

import torch


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Keeps attributes that do not exist before the first forward pass (`softmax.py:173` to 176)."""

    def forward(self, inp: torch.Tensor, mask: torch.Tensor, attn_mask_type: str, scale: float) -> torch.Tensor:
        """Return the probabilities."""
        self.input_in_fp16 = inp.dtype == torch.float16
        self.input_in_bf16 = inp.dtype == torch.bfloat16
        self.input_in_float16 = self.input_in_fp16 or self.input_in_bf16
        self.attn_mask_type = attn_mask_type
        return torch.softmax((inp * scale).masked_fill(mask, -10000.0), dim=-1)
