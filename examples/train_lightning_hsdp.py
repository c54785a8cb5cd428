"""Train with Lightning and HSDP: ``checkpointless run --cpu --nproc-per-node 4 examples/train_lightning_hsdp.py``.

``train_lightning_hsdp.diff`` has the lines that make it come through faults.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessModelParallelStrategy

WIDTH, RANKS = 64, 4


class Model(pl.LightningModule):
    """Predict the next number of each row."""

    def __init__(self) -> None:
        super().__init__()
        hidden, last = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.net = torch.nn.Sequential(hidden, torch.nn.GELU(), torch.nn.Dropout(0.1), last)

    def configure_model(self) -> None:
        """Divide the parameters among the ranks of a replica."""
        for layer in (self.net[0], self.net[3], self.net):
            fully_shard(layer, mesh=self.device_mesh["replicate", "shard"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].roll(-1, 1))

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
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=RANKS,
        strategy=CheckpointlessModelParallelStrategy(RANKS, tensor_parallel_size=1, replicas=2),
        max_steps=options.steps,
        accumulate_grad_batches=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(rows), batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
