"""Fit with Lightning, in ways in which a block hands itself something past its arguments: ``STEPS WORD``.

The data module's ``setup`` tells the LightningModule of the data, in an ``attribute``, its ``hparams`` or a
``buffer``. ``outside``: the LightningModule is made outside of the block; ``outside-late``: rank 1 waits with its
update of step 3, too. ``apart``:
each rank makes another one, and ``apart-raises``: rank 1 raises the first time, when it has no state yet.
"""

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkpointless import HPWrapper
from checkpointless.inprocess import active_call_wrapper
from checkpointless.recovery import guard
from checkpointless.strategies import CheckpointlessDDPStrategy
from checkpointless.system.environment import own_generation

STEPS, WORD = int(sys.argv[1]), sys.argv[2]


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
        self.rows = TensorDataset(rows, rows.sum(1, keepdim=True))
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        if WORD == "attribute":
            module.scale = 1 + float(rows.std())
        if WORD == "hparams":
            module.hparams.scale = 1 + float(rows.std())
        if WORD == "buffer":
            module.weight.copy_(rows.std())

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=4)


class Net(pl.LightningModule):
    scale = 1.0
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        self.register_buffer("weight", torch.ones(()), persistent=False)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        scale = self.scale * self.weight * self.hparams.get("scale", 1.0)
        return scale * torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if WORD == "apart-raises" and os.environ["RANK"] == "1" and own_generation() == 0:
            raise RuntimeError("the first time")
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def wait_after_the_vote() -> None:
    """Keep rank 1 from its update of step 3, of which all ranks have the gradients, until another rank fails."""
    original = guard.vote

    def vote(ends: bool = False) -> bool:
        said = original(ends)
        call = active_call_wrapper()
        while os.environ["RANK"] == "1" and call is not None and (call.generation, call.steps.making) == (0, 3):
            time.sleep(0.01)
        return said

    guard.vote = vote


if WORD == "outside-late":
    wait_after_the_vote()
pl.seed_everything(1)
outside = Net()


@HPWrapper()
def main() -> None:
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=STEPS,
        strategy=CheckpointlessDDPStrategy(),
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    if WORD.startswith("apart"):
        torch.manual_seed(int(os.environ["RANK"]))
    trainer.fit(outside if WORD.startswith("outside") else Net(), Data())


main()
print(f"rank {os.environ['RANK']} is done", flush=True)
