"""Change weights beside the update, under Lightning's DDP strategy, as the word says: ``bounds`` or ``parts``.

``bounds``: in each forward pass. ``parts``: in the first, to values that follow from the rank's own batch.
"""

import os
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointless import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy

WORD = sys.argv[1]
WIDTH = 8


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(4, WIDTH, max_norm=1.0 if WORD == "bounds" else None)
        self.net = torch.nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch[0] + self.rows(torch.arange(len(batch[0])))
        if WORD == "parts" and self.global_step == 0:
            self.net.bias.data.copy_(x.mean(0))
        return (self.net(x) - x.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@HPWrapper()
def main() -> None:
    pl.seed_everything(7, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=CheckpointlessDDPStrategy(),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=4))


main()
