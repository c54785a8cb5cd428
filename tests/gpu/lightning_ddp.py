"""Train the model of ``examples/train_lightning.py`` with Lightning's DDP on all nodes and ranks: ``STEPS``."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
train_lightning = importlib.import_module("train_lightning")


@HPWrapper(abort_timeout=20.0)
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    pl.seed_everything(1, verbose=False)
    rows = torch.randn(512, train_lightning.WIDTH, generator=torch.Generator().manual_seed(2))
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
    trainer.fit(train_lightning.Model(), DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
