"""Train with an ordinary Lightning trainer, which knows nothing of checkpointless."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return (self.layer(batch[0]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


pl.seed_everything(1)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=4,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=2))
