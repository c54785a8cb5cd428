"""Train with Lightning's DDP through faults, on as many nodes of as many ranks as there are: ``STEPS``."""

from __future__ import annotations

import os
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy

WIDTH = 64


class Model(pl.LightningModule):
    """Predict the next number of each row."""

    def __init__(self) -> None:
        super().__init__()
        hidden, last = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.net = torch.nn.Sequential(hidden, torch.nn.GELU(), torch.nn.Dropout(0.1), last)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        (rows,) = batch
        return torch.nn.functional.mse_loss(self.net(rows), rows.roll(-1, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@HPWrapper(abort_timeout=20.0)
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    pl.seed_everything(1, verbose=False)
    rows = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(2))
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        strategy=CheckpointlessDDPStrategy(),
        max_steps=int(sys.argv[1]),
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
