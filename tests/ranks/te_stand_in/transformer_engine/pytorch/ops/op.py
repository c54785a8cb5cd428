"""Stands for what operations are derived from."""

from __future__ import annotations

from typing import Any

import torch


class FusibleOperation(torch.nn.Module):
    """An operation."""


class BasicOperation(FusibleOperation):
    """Keeps what FP8 needs, which is None without (`ops/op.py:189` to 194)."""

    def __init__(self) -> None:
        super().__init__()
        self._fp8_metas: dict[str, Any] | None = None
        self._quantizers: dict[str, Any] | None = None
