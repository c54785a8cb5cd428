"""Train a small GPT with Lightning and one of its own strategies, DDP or FSDP2 with replicas (HSDP)."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy
from checkpointless.system.environment import own_world_size
from checkpointless.testing.demo.scripts import byte_model, options
from checkpointless.testing.demo.trainers.trainer import MICRO_BATCH, MICRO_BATCHES

OPTIONS = options.parse(__doc__, "ddp", "hsdp")


class Model(pl.LightningModule):
    """The GPT with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: Any = None

    def configure_model(self) -> None:
        """Make the GPT, in shards if the strategy shards."""
        if self.gpt is not None:
            return
        self.gpt = byte_model.ByteModel(OPTIONS.dropout)
        mesh = self.device_mesh
        if mesh is None:
            return
        for block in self.gpt.blocks:
            if OPTIONS.tensor > 1:
                parallelize_module(
                    block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
            fully_shard(block, mesh=mesh["replicate", "shard"])
        fully_shard(self.gpt, mesh=mesh["replicate", "shard"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of a microbatch."""
        loss: torch.Tensor = self.gpt(batch["tokens"], batch["labels"])
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and its scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, OPTIONS.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@HPWrapper(checkpoint_manager=options.manager(OPTIONS))
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    sharded = OPTIONS.strategy == "hsdp"
    strategy: Any = (
        CheckpointlessModelParallelStrategy(
            data_parallel_size=own_world_size() // OPTIONS.tensor,
            tensor_parallel_size=OPTIONS.tensor,
            replicas=OPTIONS.holders,
        )
        if sharded
        else CheckpointlessDDPStrategy()
    )
    pl.seed_everything(byte_model.SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=OPTIONS.steps,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=None if sharded else 1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    samples = byte_model.corpus(OPTIONS.steps, own_world_size())
    trainer.fit(Model(), DataLoader(samples, MICRO_BATCH, shuffle=True, num_workers=OPTIONS.workers))


if __name__ == "__main__":
    main()
