"""Stands for operations that can be fused, whose names Megatron looks up when it is imported."""

from transformer_engine.pytorch.ops.op import FusibleOperation


class Sequential(FusibleOperation):
    """No test uses it."""


__all__ = ["FusibleOperation", "Sequential"]
