"""The transformer that the benchmarks of checks train, on tokens that are drawn."""

from __future__ import annotations

import torch


def build(width: int, layers: int, vocabulary: int) -> torch.nn.Sequential:
    """Return an embedding, encoder layers with dropout, a norm, and an output layer."""
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    norm = torch.nn.LayerNorm(width)
    body = torch.nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
    return torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), body, torch.nn.Linear(width, vocabulary))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss for tokens of the shape (rows, tokens), of which each row's next one is to be guessed."""
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
