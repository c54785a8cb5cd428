"""Stands for what TransformerEngine's frontends share."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
