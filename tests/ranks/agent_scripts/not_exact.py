"""A training that breaks the contract on purpose in the redone step: ``TRAINER WHAT``.

TRAINER: plain, or lightning. WHAT: batch (it takes another one after a fault), loss (the loss depends on the
generation), or nothing (it keeps the contract).
"""

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from checkpointless import HPWrapper, PlainTraining
from checkpointless.inprocess import HPCallWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy
from checkpointless.system.environment import own_generation

TRAINER, WHAT = sys.argv[1:]
STEPS = 6


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 48 + (own_generation() if WHAT == "batch" else 0))


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss * (1 + own_generation()) if WHAT == "loss" else loss


def let_the_other_keep_its_loss() -> None:
    """Wait in rank 1, whose fault comes next: rank 0 has the gradients, too, and keeps its loss meanwhile."""
    if WHAT == "loss" and os.environ["RANK"] == "1" and own_generation() == 0:
        time.sleep(1.0)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return loss_of(self.net, batch)

    def on_after_backward(self) -> None:
        let_the_other_keep_its_loss()

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def lightning() -> None:
    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        strategy=CheckpointlessDDPStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())


def plain(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    training = PlainTraining(caller, [model], [optimizer])
    for step in training.steps(STEPS):
        (batch,) = DataLoader(Rows(), batch_size=4, sampler=range(4 * step, 4 * step + 4))
        loss = loss_of(model, batch)
        caller.enter_phase("backward", step)
        loss.backward()
        let_the_other_keep_its_loss()
        training.update(loss.item())


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    plain(caller) if TRAINER == "plain" else lightning()


if __name__ == "__main__":
    main()
