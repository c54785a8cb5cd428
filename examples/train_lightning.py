"""Train with Lightning alone, through faults: ``checkpointless run --cpu --nproc-per-node 4`` with this script.

Compared with the script without recovery there are two imports, a decorator, and the strategy's name.
"""

import argparse

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
        loss = torch.nn.functional.mse_loss(self.net(rows), rows.roll(-1, 1))
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@HPWrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default: 20)")
    options = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    rows = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(2))
    trainer = pl.Trainer(
        accelerator="cpu" if not torch.cuda.is_available() else "gpu",
        devices=-1 if torch.cuda.is_available() else 4,
        strategy=CheckpointlessDDPStrategy(),
        max_steps=options.steps,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
