"""Fit with loaders that Lightning makes in each epoch, with workers that stay between passes: ``STEPS EVERY``.

The data module counts how often it was asked for them, and deals out batches by an attribute that a hook changes at
each epoch's end. There is a validation after every so many epochs.
"""

import os
import sys

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, random_split

from checkpointless import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy


class Noisy(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] + 0.1 * torch.from_numpy(np.random.randn(8)).float()


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = [0, 0]
        self.batch = 4

    def setup(self, stage: str) -> None:
        self.parts = random_split(Noisy(), [32, 8], generator=torch.Generator().manual_seed(3))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        self.asked[0] += 1
        return DataLoader(self.parts[0], self.batch, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        self.asked[1] += 1
        return DataLoader(self.parts[1], 4, num_workers=1, persistent_workers=True)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val", self.net(batch).mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.trainer.datamodule.batch = 4 if self.current_epoch % 2 else 2  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@HPWrapper()
def main() -> None:
    pl.seed_everything(4, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=int(sys.argv[1]),
        strategy=CheckpointlessDDPStrategy(),
        reload_dataloaders_every_n_epochs=1,
        check_val_every_n_epoch=int(sys.argv[2]),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), datamodule=Data())


main()
