"""Stands for recipes of FP8, of which Megatron derives one when it is imported; no test uses one."""

import enum


class Format(enum.Enum):
    """The formats of FP8."""

    E4M3 = enum.auto()
    HYBRID = enum.auto()


class Recipe:
    """How tensors are scaled."""


class DelayedScaling(Recipe):
    """Scaling by the largest values of earlier steps."""
