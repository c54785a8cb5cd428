"""A small GPT of torch's own modules, and the batches that it is trained on."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from checkpointless.inprocess import HPCallWrapper
from checkpointless.recovery import seed_data_workers
from checkpointless.testing.demo.corpus import TextWindows, english
from checkpointless.testing.demo.trainers.trainer import MICRO_BATCH, MICRO_BATCHES, SEQUENCE

BYTES, WIDTH, HEADS, LAYERS = 256, 64, 4, 4
SEED = 1234


class Block(torch.nn.Module):
    """Causal attention and a feed-forward network, each with a residual connection.

    Args:
        dropout: dropout probability.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_feed = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.mix, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out for ``x`` of shape (samples, tokens, WIDTH)."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.mix(self.before_attention(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.before_feed(x)))))


class ByteModel(torch.nn.Module):
    """A GPT that predicts the next byte.

    Args:
        dropout: dropout probability.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(BYTES, WIDTH), torch.nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = torch.nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``tokens`` (int64, of shape (samples, SEQUENCE)) and their ``labels``."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def corpus(steps: int, ranks: int) -> TextWindows:
    """Return as many samples as ``ranks`` data-parallel ranks need for ``steps`` optimizer steps."""
    return TextWindows(english(), SEQUENCE, steps * MICRO_BATCHES * MICRO_BATCH * ranks, SEED)


def batches(
    call: HPCallWrapper, steps: int, first: int, rank: int, ranks: int, workers: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Return the microbatches of a rank, from those of step ``first``.

    Args:
        call: the running wrapper, which is told of the workers, so that faults can end them.
        steps: number of optimizer steps.
        first: step whose microbatches come first, counted from 1.
        rank: this rank's number among the data-parallel ranks.
        ranks: number of data-parallel ranks.
        workers: number of workers of the data loader.

    Returns:
        Microbatches with ``tokens`` and ``labels``, int64, of shape (MICRO_BATCH, SEQUENCE).
    """
    samples = [
        [(micro * ranks + rank) * MICRO_BATCH + place for place in range(MICRO_BATCH)]
        for micro in range((first - 1) * MICRO_BATCHES, steps * MICRO_BATCHES)
    ]
    loader = DataLoader(
        corpus(steps, ranks), batch_sampler=samples, num_workers=workers, generator=torch.Generator()
    )
    seed_data_workers(loader, seed=SEED, rank=rank)
    iterator = iter(loader)
    if call.faults is not None and workers:
        call.faults.batches = lambda: iterator
    return iterator
