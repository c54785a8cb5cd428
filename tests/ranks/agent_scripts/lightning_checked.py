"""Train with Lightning, gradients checked, metrics and attributes that change in it: ``STEPS EVERY [FEATURES]``."""

import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from checkpointless import HPWrapper
from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy

STEPS, EVERY, FEATURES = int(sys.argv[1]), int(sys.argv[2]), frozenset(sys.argv[3:])
WIDTH = 8


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, WIDTH)
        self.mean, self.scale = MeanMetric(), 1.0
        self.body = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Dropout(0.1),
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 20),
        )

    def configure_model(self) -> None:
        if "sharded" in FEATURES:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.scale *= 1.01
        logits = self.body(self.embedding(tokens))
        loss = self.scale * torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Counts(Callback):
    def __init__(self) -> None:
        self.passes = 0

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.passes += 1


@HPWrapper()
def main() -> None:
    pl.seed_everything(5, verbose=False)
    tokens = torch.randint(20, (96, 5), generator=torch.Generator().manual_seed(3))
    kind: Any = CheckpointlessModelParallelStrategy if "sharded" in FEATURES else CheckpointlessDDPStrategy
    counts, model = Counts(), Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=kind(sdc_check_every=EVERY),
        max_steps=STEPS,
        accumulate_grad_batches=2,
        callbacks=[counts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(tokens, batch_size=3, shuffle=True))  # type: ignore[arg-type]
    logged = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
    print(f"ends with {counts.passes} {model.scale!r} {logged}", flush=True)


main()
