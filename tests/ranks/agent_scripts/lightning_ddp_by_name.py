"""Train with a strategy of Lightning's, which resumes from its own checkpoint after a fault."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from checkpointless import HPWrapper


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@HPWrapper()
def main() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 4)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=8,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=2, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Line(), data, ckpt_path="last")


main()
