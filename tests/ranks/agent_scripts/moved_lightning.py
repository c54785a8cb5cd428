"""Train with Lightning's DDP while a node moves: ``STEPS [waits]``."""

import os
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointless import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy
from tests.ranks.moving import Waits

STEPS = int(sys.argv[1])


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1))
        self.seen = 0

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.seen += 1
        return (self.layers(batch[0]) ** 2).mean() + 0.01 * self.seen

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@HPWrapper()
def main() -> None:
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=CheckpointlessDDPStrategy(),
        max_steps=STEPS,
        callbacks=[Waits()] if "waits" in sys.argv else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(96, 12)), batch_size=3, shuffle=True))


main()
